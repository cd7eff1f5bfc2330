"""Laws and path probabilities of ancestral sampling, by enumeration; what it computes."""

import pytest
import torch

from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.state import Canvas

from .enumeration import all_states, ancestral_law, assert_follows, follows, index
from .toys import LINEAR, TINY, blank, start, toy_of

BLANK = Canvas.blank(20_000, 4, 3)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("schedule", [LINEAR, LogLinear(1e-3), Cosine(0.0)])
def test_the_samples_follow_the_enumerated_law(steps, schedule):
    """Chi-square over all 81 texts; the law of other steps must fail it."""
    result = ancestral(toy_of(), schedule, start(BLANK, seed=5), steps=steps)
    assert_follows(result.tokens, ancestral_law(TINY, schedule, steps), 3)
    other = 1 if steps > 1 else 4
    assert not follows(result.tokens, ancestral_law(TINY, schedule, other), 3)


STREAMS = {2: [{0}, {1, 2, 3}], 3: [{0}, {2}, {1, 3}], 4: [{0}, set(), {2}, {1, 3}]}
"""Positions of a window of 4 that each step reveals; the second step of 4 is that of a fifth."""


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("schedule", [LINEAR, Cosine(1e-3)])
def test_streams_follow_the_enumerated_law_and_know_its_probabilities(steps, schedule):
    """Under every schedule; a text has one path, so its probability is the text's."""
    texts, known = all_states(3, 4), set()
    log_p = torch.zeros(len(texts), dtype=torch.float64)
    for shown in STREAMS[steps]:
        z = texts.clone()
        z[:, [i for i in range(4) if i not in known]] = 3
        each = TINY.denoiser(z).gather(-1, texts[..., None]).squeeze(-1)
        log_p += each[:, sorted(shown)].sum(1)
        known |= shown
    torch.testing.assert_close(log_p.exp().sum(), torch.ones((), dtype=torch.float64))
    result = ancestral(toy_of(), schedule, start(BLANK, seed=2), steps=steps, order="streams")
    assert_follows(result.tokens, log_p.exp(), 3)
    torch.testing.assert_close(result.log_prob, log_p[index(result.tokens, 3)])


@pytest.mark.parametrize(("order", "steps"), [("random", 4000), ("streams", 64)])
def test_one_token_at_a_time_knows_its_exact_probability(order, steps):
    """With very many steps a path reveals one token at a time: its log-probability is log p(x)."""
    result = ancestral(toy_of(), LINEAR, blank(20, 4, 3), steps=steps, order=order)
    torch.testing.assert_close(result.log_prob, TINY.log_prob(result.tokens))
    assert result.passes <= 4.01


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_nothing_is_computed_that_is_not_needed(steps):
    """First pass shared, output layer once per token at most, no pass for a sample at rest."""
    denoiser, seen = toy_of(), []
    ancestral(denoiser, LINEAR, blank(64, 4, 3, seen.append), steps=steps)
    active = [step.revealed.any(1).sum().item() for step in seen if step.revealed.any()]
    outputs = [step.revealed.sum().item() for step in seen if step.revealed.any()]
    first = next(step.revealed.any(0).sum().item() for step in seen if step.revealed.any())
    assert denoiser.inputs == 1 + sum(active[1:]) <= 64 * min(steps, 4)
    assert denoiser.outputs == first + sum(outputs[1:]) <= 64 * 4
