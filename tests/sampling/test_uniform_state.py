import pytest
import torch
from tests.process.reference import UNIFORM, V, level, random_joint

from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.process.uniform import posterior
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.plan import time_grid
from didi_instruct.sampling.state import Canvas
from didi_instruct.sampling.uniform_state import uniform_state

from .enumeration import all_states, assert_follows, independent_step, index
from .toys import LINEAR, Toy, blank, start

L = 2
EVEN = torch.full((V**L,), 1 / V**L, dtype=torch.float64)


class Exact:
    """The exact denoiser of a language of V^L texts, which has to know the time."""

    def __init__(self, schedule, steps):
        self.joint = random_joint(L)
        times = torch.tensor(time_grid("uniform", steps), dtype=torch.float64)
        self.alphas, self.times = schedule.alpha(times).view(-1, 1, 1), times.float()
        self.tables = [UNIFORM.denoiser(self.joint, L, alpha) for alpha in self.alphas[:-1]]

    def __call__(self, z, t):
        return self.tables[int((self.times == t[0]).nonzero())][index(z, V)].log()

    def law(self):
        """Law of the sampler by enumeration."""
        mass, texts = EVEN, all_states(V, L)
        for table, alpha_t, alpha_s in zip(
            self.tables, self.alphas[:-1], self.alphas[1:], strict=True
        ):
            mass = independent_step(mass, posterior(texts, table, alpha_s, alpha_t))
        return mass


def sample(function, num, steps, schedule=LINEAR, *, callback=None, greedy_tail=False):
    denoiser = function if isinstance(function, Toy) else function_denoiser(function, V)
    state = blank(num, L, V, callback, seed=5)
    return uniform_state(denoiser, schedule, state, steps=steps, greedy_tail=greedy_tail)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0)], ids=str)
def test_the_samples_follow_the_enumerated_law(steps, schedule):
    exact = Exact(schedule, steps)
    result = sample(exact, 20_000, steps, schedule)
    assert_follows(result.tokens, exact.law(), V)
    assert result.nfe == steps
    assert result.passes <= steps
    assert result.log_prob is None


def test_a_greedy_tail_takes_the_most_probable_posterior():
    exact, seen = Exact(LogLinear(0.0), 2), []
    result = sample(exact, 50, 2, greedy_tail=True, callback=seen.append)
    z = seen[0].tokens
    # Bayes' rule: the noisy token has likelihood alpha + (1 - alpha) / V, the others the latter.
    weight = exact.tables[1][index(z, V)] * UNIFORM.marginal(z, level(0.5))
    assert torch.equal(result.tokens, weight.argmax(-1))


def test_the_start_is_uniform():
    """What the denoiser sees first, and what one that knows nothing leaves."""
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, V), V, every=True)
    result = sample(denoiser, 20_000, 3)
    assert_follows(denoiser.asked[0][0], EVEN, V)
    assert_follows(result.tokens, EVEN, V)


@pytest.mark.parametrize("mask_id", [-2, V, 99])
def test_any_number_that_is_no_token_marks_what_to_write(mask_id):
    """A given token stays and is shown to the denoiser; the marker is not."""
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, V), V, every=True)
    canvas = Canvas(torch.tensor([[mask_id, 2]] * 50), mask_id, torch.arange(50))
    result = uniform_state(denoiser, LogLinear(0.0), start(canvas), steps=3)
    assert bool((result.tokens[:, 1] == 2).all())
    asked = torch.cat([z for z, _ in denoiser.asked])
    assert bool((asked[:, 1] == 2).all())
    assert set(asked[:, 0].tolist()) == {0, 1, 2}
