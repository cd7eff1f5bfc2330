"""Steps that share a code: their law and their log-probability, by enumeration."""

import itertools
import math

import pytest
import torch

from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.first_hitting import first_hitting
from didi_instruct.sampling.ordered import ordered
from didi_instruct.sampling.prompts import Gap, gap_lengths

V, L, K = 3, 3, 2
TABLE = torch.randn(V + K, V + K, V + K, L, V, generator=torch.Generator().manual_seed(0)) * 1.5
"""Logits for every state: as odd as a law can be, and other ones for every code."""
STATES = list(itertools.product(range(V), repeat=L))


class Denoiser:
    """Looks logits up, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, z, t):
        self.asked.append(z)
        return TABLE[z[:, 0], z[:, 1], z[:, 2]]


def step_law(state, shown, temperature=1.0):
    """Law of the tokens that a step writes at some positions: a mixture over codes of products."""
    found = {}
    for code in range(K):
        coded = tuple(v if v < V else V + code for v in state)
        p = (TABLE[coded] / temperature).double().softmax(-1)
        for tokens in itertools.product(range(V), repeat=len(shown)):
            mass = math.prod(p[i, v].item() for i, v in zip(shown, tokens, strict=True))
            found[tokens] = found.get(tokens, 0.0) + mass / K
    return found


def exact_law(steps):
    """Law of ancestral samples: each mask is revealed at a uniform one of the steps."""
    law = dict.fromkeys(STATES, 0.0)
    for when in itertools.product(range(steps), repeat=L):
        states = {(V,) * L: 1 / steps**L}
        for step in range(steps):
            shown = [i for i in range(L) if when[i] == step]
            following = {}
            for state, mass in states.items():
                for tokens, p in step_law(state, shown).items():
                    new = list(state)
                    for i, token in zip(shown, tokens, strict=True):
                        new[i] = token
                    following[tuple(new)] = following.get(tuple(new), 0.0) + mass * p
            states = following
        for state, mass in states.items():
            law[state] += mass
    return torch.tensor([law[state] for state in STATES], dtype=torch.float64)


def draw(num, steps, *, denoiser=None, callback=None, **settings):
    canvas = Canvas(torch.full((num, L), V), V, torch.arange(num), masks=K)
    return ancestral(
        denoiser or Denoiser(),
        LogLinear(0.0),
        canvas,
        steps=steps,
        settings=Draw(**settings),
        callback=callback,
    )


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_samples_follow_the_enumerated_mixture(steps):
    """Chi-square over 27 texts, 26 degrees of freedom; critical value 64 at 5e-5."""
    law, num = exact_law(steps), 20_000
    assert law.sum().item() == pytest.approx(1)
    places = (draw(num, steps, seed=3).tokens * torch.tensor([9, 3, 1])).sum(1)
    counts = torch.bincount(places, minlength=V**L)
    assert ((counts - num * law) ** 2 / (num * law)).sum() < 64


def test_a_code_makes_positions_of_a_step_dependent():
    """What it is for: the law of one step is not the product of its marginals."""
    law = exact_law(1).view(V, V, V)
    product = (
        law.sum((1, 2))[:, None, None]
        * law.sum((0, 2))[None, :, None]
        * law.sum((0, 1))[None, None]
    )
    assert (law * (law / product).log()).sum() > 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_path_knows_its_probability_under_the_mixture(steps, temperature):
    """Step by step: the code is summed out, not the one that was drawn."""
    paths = []
    drawn = draw(
        64, steps, seed=1, temperature=temperature,
        callback=lambda step: paths.append((step.tokens.clone(), step.revealed)),
    )  # fmt: skip
    for sample in range(64):
        state, expected = (V,) * L, 0.0
        for tokens, revealed in paths:
            shown = revealed[sample].nonzero().squeeze(1).tolist()
            new = tuple(tokens[sample].tolist())
            law = step_law(state, shown, temperature)
            expected += math.log(law[tuple(new[i] for i in shown)])
            state = new
        assert drawn.log_prob[sample].item() == pytest.approx(expected, abs=1e-5)


def test_measuring_costs_no_counted_pass_and_changes_no_sample():
    measured, plain = draw(64, 3, seed=1), draw(64, 3, seed=1, measure_path=False)
    assert torch.equal(measured.tokens, plain.tokens)
    assert measured.passes == plain.passes
    assert plain.log_prob is None


def test_the_first_step_runs_a_row_for_each_code():
    denoiser = Denoiser()
    draw(64, 1, denoiser=denoiser, measure_path=False)
    assert [len(z) for z in denoiser.asked] == [K]
    assert denoiser.asked[0].tolist() == [[V] * L, [V + 1] * L]


def test_codes_are_fair_drawn_anew_for_each_step_and_belong_to_the_sample():
    """1,000 samples, 2 steps: shares of codes and of equal pairs within 4 standard errors."""
    denoiser, seen = Denoiser(), []
    canvas = Canvas(torch.full((1000, L), V), V, torch.arange(1000), masks=K)

    def ask(z, t):
        seen.append(z.max(1).values - V)
        return denoiser(z, t)

    first_hitting(ask, LogLinear(0.0), canvas, settings=Draw(seed=2, measure_path=False))
    second, third = seen[1].float(), seen[2].float()  # the first step runs a row for each code
    for share in (second.mean(), third.mean(), (second == third).float().mean()):
        assert abs(share - 0.5) < 4 * 0.5 / 1000**0.5
    half = Canvas(torch.full((500, L), V), V, torch.arange(500, 1000), masks=K)
    part = first_hitting(denoiser, LogLinear(0.0), half, settings=Draw(seed=2))
    whole = first_hitting(denoiser, LogLinear(0.0), canvas, settings=Draw(seed=2))
    assert torch.equal(part.tokens, whole.tokens[500:])
    assert torch.equal(part.log_prob, whole.log_prob[500:])


def test_other_samplers_write_with_codes_too():
    canvas = Canvas(torch.full((8, L), V), V, torch.arange(8), masks=K)
    done = ordered(Denoiser(), canvas, steps=2, order="confidence")
    assert int(done.tokens.max()) < V
    assert done.log_prob is None


def test_a_first_step_costs_a_pass_for_each_code_that_was_drawn():
    """64 samples of 2 codes: 2 of 64 passes, then a whole one for each sample a step touches."""
    assert draw(64, 1, measure_path=False).passes == pytest.approx(2 / 64)


def test_a_greedy_tail_is_summed_out_too():
    """The last step takes the likeliest token of its code: of the codes, those that agree count."""
    canvas = Canvas(torch.full((64, L), V), V, torch.arange(64), masks=K)
    done = ancestral(Denoiser(), LogLinear(0.0), canvas, steps=1, greedy_tail=True)
    best = [TABLE[V + c, V + c, V + c].argmax(-1) for c in range(K)]
    for tokens, log_p in zip(done.tokens, done.log_prob, strict=True):
        agree = sum(bool((tokens == choice).all()) for choice in best)
        assert log_p.item() == pytest.approx(math.log(agree / K))


def test_a_gap_is_as_long_as_the_mixture_says():
    """p(length) is proportional to the mean over codes of the probability of what follows it."""
    template = [[0], Gap(1, 2, chosen=True), [1]]
    scores = []
    lengths, passes = gap_lengths(template, Padded(), V, 0, torch.arange(4000), None, masks=K)
    for length in (1, 2):
        p = 0.0
        for code in range(K):
            z = [0, *[V + code] * (length + 1)]
            p += Padded.law(z)[length + 1, 1].item() / K
        scores.append(p)
    share = sum(row[0] == 1 for row in lengths) / 4000
    expected = scores[0] / sum(scores)
    assert abs(share - expected) < 5 * math.sqrt(0.25 / 4000)
    assert passes == 2 * K


class Padded:
    """A denoiser of up to four positions whose law depends on the code and the length."""

    @staticmethod
    def law(z):
        return torch.stack([Padded.logits(z, i) for i in range(len(z))]).softmax(-1)

    @staticmethod
    def logits(z, i):
        key = sum((v + 1) * 7**k for k, v in enumerate(z)) * 11 + i
        return 2 * torch.randn(V, generator=torch.Generator().manual_seed(key), dtype=torch.float64)

    def __call__(self, z, t):
        rows = []
        for row in z.tolist():
            text = [v for v in row if v >= 0]
            logits = [self.logits(text, i) for i in range(len(text))]
            rows.append(torch.stack(logits + [torch.zeros(V).double()] * (len(row) - len(text))))
        return torch.stack(rows)
