import itertools

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.grids import time_grid


def exact_law(language, alphas):
    """Law of the sampler by enumeration: sum over reveal orders of products of conditionals."""
    V, L = language.num_tokens, language.length
    states = {(V,) * L: 1.0}
    for alpha_t, alpha_s in itertools.pairwise(alphas):
        chance = (alpha_s - alpha_t) / (1 - alpha_t)
        z = torch.tensor(list(states))
        p = language.denoiser(z).exp()
        following = {}
        for row, (state, mass) in enumerate(states.items()):
            masked = [i for i in range(L) if state[i] == V]
            for flips in itertools.product([False, True], repeat=len(masked)):
                shown = [i for i, flip in zip(masked, flips, strict=True) if flip]
                weight = mass * chance ** len(shown) * (1 - chance) ** (len(masked) - len(shown))
                for tokens in itertools.product(range(V), repeat=len(shown)):
                    new = list(state)
                    probability = weight
                    for i, token in zip(shown, tokens, strict=True):
                        new[i] = token
                        probability *= p[row, i, token].item()
                    if probability:
                        following[tuple(new)] = following.get(tuple(new), 0.0) + probability
        states = following
    return states


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0)])
def test_the_samples_follow_the_enumerated_law(steps, schedule):
    """Chi-square over all 81 sequences, 80 degrees of freedom; critical value 138 at 6e-5."""
    language = OracleLanguage.tiny()
    n = 20_000
    canvas = Canvas.blank(n, 4, 3)
    result = ancestral(language.denoiser, schedule, canvas, steps=steps, settings=Draw(seed=5))
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    law = exact_law(language, [*schedule.alpha(times).tolist()[:-1], 1.0])
    assert sum(law.values()) == pytest.approx(1)
    expected = torch.zeros(3**4, dtype=torch.float64)
    powers = torch.tensor([27, 9, 3, 1])
    for state, p in law.items():
        expected[int((torch.tensor(state) * powers).sum())] = p
    counts = torch.bincount((result.tokens * powers).sum(1), minlength=81)
    assert ((counts - n * expected) ** 2 / (n * expected)).sum() < 138


def test_one_token_at_a_time_knows_its_exact_probability():
    """With very many steps a path reveals one token at a time: its log-probability is log p(x)."""
    language = OracleLanguage.tiny()
    result = ancestral(language.denoiser, LogLinear(0.0), Canvas.blank(20, 4, 3), steps=4000)
    torch.testing.assert_close(result.log_prob, language.log_prob(result.tokens))


def test_a_sample_does_not_depend_on_its_batch_and_nfe_counts_steps():
    language = OracleLanguage.tiny()
    whole = ancestral(language.denoiser, LogLinear(0.0), Canvas.blank(9, 4, 3), steps=3)
    alone = Canvas.blank(1, 4, 3, first=7)
    part = ancestral(language.denoiser, LogLinear(0.0), alone, steps=3)
    assert torch.equal(part.tokens[0], whole.tokens[7])
    assert whole.nfe == part.nfe == 3


class Counting:
    """A denoiser that counts the rows it is run on, and the rows of its output layer."""

    def __init__(self, language):
        self.language, self.inputs, self.outputs = language, 0, 0

    def __call__(self, z, t):
        raise AssertionError("the shortcut was not taken")

    def rows(self, z, t, where):
        self.inputs += len(z)
        self.outputs += int(where.sum())
        return self.language.denoiser(z, t)[where]


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_nothing_is_computed_that_is_not_needed(steps):
    """First pass shared, output layer once per token at most, no pass for a sample at rest."""
    language = OracleLanguage.tiny()
    counting = Counting(language)
    fast = ancestral(counting, LogLinear(0.0), Canvas.blank(64, 4, 3), steps=steps)
    plain = ancestral(language.denoiser, LogLinear(0.0), Canvas.blank(64, 4, 3), steps=steps)
    assert torch.equal(fast.tokens, plain.tokens)
    torch.testing.assert_close(fast.log_prob, plain.log_prob)
    assert counting.outputs <= 64 * 4
    assert counting.inputs <= 64 * min(steps, 4)
    assert fast.passes == pytest.approx(counting.inputs / 64)
    if steps == 1:
        assert counting.inputs == 1
        assert counting.outputs == 4


def test_given_tokens_stay_and_condition_the_rest():
    """Infilling with many steps follows the conditional law; chi-square, 8 degrees, 4e-5."""
    language = OracleLanguage.tiny()
    n = 5000
    tokens = torch.tensor([[3, 1, 3, 2]]).expand(n, 4)
    canvas = Canvas(tokens, 3, torch.arange(n))
    result = ancestral(language.denoiser, LogLinear(0.0), canvas, steps=200)
    assert bool((result.tokens[:, [1, 3]] == torch.tensor([1, 2])).all())
    every = torch.tensor([[a, 1, b, 2] for a in range(3) for b in range(3)])
    expected = language.log_prob(every).softmax(0) * n
    counts = torch.bincount(result.tokens[:, 0] * 3 + result.tokens[:, 2], minlength=9)
    assert ((counts - expected) ** 2 / expected).sum() < 35


def test_a_greedy_tail_takes_the_most_probable():
    language = OracleLanguage.tiny()
    result = ancestral(
        language.denoiser, LogLinear(0.0), Canvas.blank(3, 4, 3), steps=1, greedy_tail=True
    )
    best = language.denoiser(torch.full((1, 4), 3)).argmax(-1)
    assert torch.equal(result.tokens, best.expand(3, 4))


def test_a_callback_sees_every_step():
    language = OracleLanguage.tiny()
    seen = []
    ancestral(
        language.denoiser, LogLinear(0.0), Canvas.blank(2, 4, 3), steps=5, callback=seen.append
    )
    assert [step.index for step in seen] == [0, 1, 2, 3, 4]
    assert seen[0].time == 1.0
    assert torch.equal(sum(step.revealed.int() for step in seen), torch.ones(2, 4, dtype=torch.int))
    for step in seen:
        assert torch.equal(step.confidence > 0, step.tokens != 3)


@pytest.mark.parametrize("grid", ["uniform", "cosine", [1.0, 0.9, 0.2, 0.0]])
def test_grids_run_from_one_to_zero(grid):
    times = time_grid(grid, 3)
    assert (len(times), times[0], times[-1]) == (4, 1.0, 0.0)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("grid", ["linear", [1.0, 0.0], [1.0, 0.5, 0.6, 0.0], [0.9, 0.5, 0.2, 0.0]])
def test_other_grids_are_refused(grid):
    with pytest.raises(UserError, match="time grid"):
        time_grid(grid, 3)


def test_steps_below_one_are_refused():
    with pytest.raises(UserError, match="steps is 0"):
        ancestral(None, LogLinear(0.0), Canvas.blank(1, 4, 3), steps=0)


def test_logits_that_are_not_numbers_are_refused():
    def broken(z, t):
        return torch.full((*z.shape, 3), float("nan"))

    with pytest.raises(UserError, match="not numbers"):
        ancestral(broken, LogLinear(0.0), Canvas.blank(1, 4, 3), steps=2)


def test_more_steps_come_closer_to_the_true_law():
    """Exact KL of the enumerated law to the language falls with every doubling of the steps."""
    language = OracleLanguage.tiny()
    gaps = []
    for steps in (1, 2, 4, 8):
        law = exact_law(language, torch.linspace(0, 1, steps + 1, dtype=torch.float64).tolist())
        states = torch.tensor(list(law))
        p = torch.tensor(list(law.values()), dtype=torch.float64)
        gaps.append(float((p * (p.log() - language.log_prob(states))).sum()))
    assert gaps[0] > 0.01
    for fewer, more in itertools.pairwise(gaps):
        assert 0 <= more < 0.7 * fewer
