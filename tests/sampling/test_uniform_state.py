import pytest
import torch
import torch.nn.functional as F

from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.process.uniform import marginal, posterior
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.plan import time_grid
from didi_instruct.sampling.state import Canvas
from didi_instruct.sampling.uniform_state import uniform_state

from .enumeration import all_states, assert_follows, independent_step, index
from .toys import Toy

V, L = 3, 2
TEXTS = all_states(V, L)


def random_joint():
    """Probabilities of all V^L texts, correlated and far from uniform."""
    generator = torch.Generator().manual_seed(0)
    return (1.5 * torch.randn(V**L, generator=generator, dtype=torch.float64)).softmax(0)


def leave_one_out(joint, alpha):
    """p(x^l | z^{-l}) for every text z: (Z, L, V)."""
    q = marginal(TEXTS, torch.tensor([[alpha]], dtype=torch.float64), V)  # (X, L, V)
    likelihood = q[:, torch.arange(L), TEXTS].transpose(0, 1)  # (Z, X, L)
    evidence = likelihood.prod(-1, keepdim=True) / likelihood * joint[:, None]
    weights = evidence / evidence.sum(1, keepdim=True)
    return torch.einsum("zxl,xlv->zlv", weights, F.one_hot(TEXTS, V).double())


class Exact:
    """The exact denoiser of a language of V^L texts, which has to know the time."""

    def __init__(self, schedule, steps):
        self.joint = random_joint()
        times = torch.tensor(time_grid("uniform", steps), dtype=torch.float64)
        self.alphas = schedule.alpha(times).tolist()
        self.times = times.float()
        self.tables = [leave_one_out(self.joint, alpha) for alpha in self.alphas[:-1]]

    def __call__(self, z, t):
        table = self.tables[int((self.times == t[0]).nonzero())]
        return table[index(z, V)].log()

    def law(self):
        """Law of the sampler by enumeration."""
        mass = torch.full((V**L,), 1 / V**L, dtype=torch.float64)
        for n, table in enumerate(self.tables):
            s, t = (
                torch.tensor([[a]], dtype=torch.float64)
                for a in (self.alphas[n + 1], self.alphas[n])
            )
            mass = independent_step(mass, posterior(TEXTS, table, s, t))
        return mass


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0)])
def test_the_samples_follow_the_enumerated_law(steps, schedule):
    exact = Exact(schedule, steps)
    canvas = Canvas.blank(20_000, L, V)
    result = uniform_state(
        function_denoiser(exact, V), schedule, canvas, steps=steps, settings=DrawOptions(seed=5)
    )
    assert_follows(result.tokens, exact.law(), V)
    assert result.nfe == steps
    assert result.passes <= steps
    assert result.log_prob is None


def test_many_steps_approach_the_data():
    """The enumerated law: its distance to the data falls as 1 / N."""
    distances = []
    for steps in [1, 4, 16, 64, 256]:
        exact = Exact(LogLinear(0.0), steps)
        distances.append((exact.law() - exact.joint).abs().sum().item() / 2)
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 50


def test_a_greedy_tail_takes_the_most_probable_posterior():
    exact = Exact(LogLinear(0.0), 2)
    seen = []
    run = {"steps": 2, "greedy_tail": True, "callback": seen.append}
    denoiser = function_denoiser(exact, V)
    result = uniform_state(denoiser, LogLinear(0.0), Canvas.blank(50, L, V), **run)
    z = seen[0].tokens
    p_x = exact.tables[1][index(z, V)]
    # Bayes' rule: the noisy token has likelihood alpha + (1 - alpha) / V, the others the latter.
    weight = p_x * (0.5 + V * 0.5 * F.one_hot(z, V))
    assert torch.equal(result.tokens, weight.argmax(-1))


def test_the_start_is_uniform():
    """What the denoiser sees first, and what one that knows nothing leaves."""
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, V), V, every=True)
    result = uniform_state(denoiser, LogLinear(0.0), Canvas.blank(20_000, L, V), steps=3)
    uniform = torch.full((V**L,), 1 / V**L, dtype=torch.float64)
    assert_follows(denoiser.asked[0][0], uniform, V)
    assert_follows(result.tokens, uniform, V)


@pytest.mark.parametrize("mask_id", [-2, V, 99])
def test_any_number_that_is_no_token_marks_what_to_write(mask_id):
    """A given token stays and is shown to the denoiser; the marker is not."""
    denoiser = Toy(lambda z, t: torch.zeros(*z.shape, V), V, every=True)
    canvas = Canvas(torch.tensor([[mask_id, 2]] * 50), mask_id, torch.arange(50))
    result = uniform_state(denoiser, LogLinear(0.0), canvas, steps=3)
    assert bool((result.tokens[:, 1] == 2).all())
    asked = torch.cat([z for z, _ in denoiser.asked])
    assert bool((asked[:, 1] == 2).all())
    assert set(asked[:, 0].tolist()) == {0, 1, 2}
