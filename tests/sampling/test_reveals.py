"""Ancestral sampling in an order that keeps neighbours apart: its exact law."""

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.budgets import path_times
from didi_instruct.distillation.rollout import Noise, order_of, walk
from didi_instruct.errors import UserError
from didi_instruct.process.masking import interleaved_shares, interleaved_times, revealed_shares
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw

from .enumeration import all_states, assert_follows, index

LANGUAGE = OracleLanguage.tiny()
PLANS = {2: [{0}, {1, 2, 3}], 3: [{0}, {2}, {1, 3}], 4: [{0}, set(), {2}, {1, 3}]}
"""Positions of a window of 4 that each step reveals; the second step of 4 is that of a fifth."""


def exact_law(steps):
    """Products of conditionals, tokens of a step independent: log-probabilities of all texts."""
    texts, known = all_states(3, 4), set()
    log_p = torch.zeros(len(texts), dtype=torch.float64)
    for shown in PLANS[steps]:
        z = texts.clone()
        z[:, [i for i in range(4) if i not in known]] = 3
        each = LANGUAGE.denoiser(z).gather(-1, texts[..., None]).squeeze(-1)
        log_p += each[:, sorted(shown)].sum(1)
        known |= shown
    return log_p


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_samples_follow_the_enumerated_law(steps):
    """Chi-square, false alarms 1e-5; a text has one path, so its probability is the text's."""
    canvas = Canvas.blank(20_000, 4, 3)
    result = ancestral(
        LANGUAGE.denoiser,
        LogLinear(0.0),
        canvas,
        steps=steps,
        settings=Draw(seed=2),
        order="streams",
    )
    law = exact_law(steps)
    torch.testing.assert_close(law.exp().sum(), torch.ones((), dtype=torch.float64))
    assert_follows(result.tokens, law.exp(), 3)
    torch.testing.assert_close(result.log_prob, law[index(result.tokens, 3)])


@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(0.1), Cosine(0.0)])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_walk_of_a_distillation_has_the_same_law_and_probabilities(steps, schedule):
    """Under every schedule: false alarms 1e-5."""
    noise, count = Noise(3, torch.arange(20_000)), 20_000
    start, budget = torch.full((1, 4), 3), torch.full((20_000,), steps)
    times = torch.tensor(interleaved_times(schedule, steps), dtype=torch.float64)

    def rows(z, t, where):
        return LANGUAGE.denoiser(z)[where]

    owner = torch.zeros(count, dtype=torch.long)
    order = order_of("streams", noise, (start == 3)[owner], budget, (2, 3, 4))
    times = times.expand(count, -1)
    walked = walk(rows, schedule, start, owner, times, noise, 3, order)
    law = exact_law(steps)
    assert_follows(walked.z, law.exp(), 3)
    torch.testing.assert_close(walked.log_prob, law[index(walked.z, 3)])


def test_one_token_at_a_time_knows_its_exact_probability():
    """With very many steps no step of a window of 4 reveals two: from left to right."""
    canvas = Canvas.blank(20, 4, 3)
    result = ancestral(LANGUAGE.denoiser, LogLinear(0.0), canvas, steps=64, order="streams")
    torch.testing.assert_close(result.log_prob, LANGUAGE.log_prob(result.tokens))
    assert result.passes <= 4.01


@pytest.mark.parametrize("steps", [3, 8, 16])
def test_training_and_sampling_stand_at_the_same_times(steps):
    """What is masked at the times of sampling is what the walks of distillation mask then."""
    for schedule in (LogLinear(1e-3), Cosine(0.0)):
        where = torch.arange(steps, dtype=torch.float64) / steps + 1e-6
        _, t, after, _ = path_times((steps,), where, "streams", schedule)
        expected = torch.tensor(interleaved_times(schedule, steps), dtype=torch.float64)
        torch.testing.assert_close(
            torch.stack([t, after]), torch.stack([expected[:-1], expected[1:]])
        )
        shares_then = revealed_shares(schedule, expected)
        torch.testing.assert_close(shares_then.tolist(), list(interleaved_shares(steps)))


def test_a_grid_beside_streams_is_refused():
    with pytest.raises(UserError, match="leave out grid"):
        ancestral(
            LANGUAGE.denoiser, LogLinear(0.0), Canvas.blank(1, 4, 3), steps=2, order="streams",
            grid="cosine",
        )  # fmt: skip


def test_an_unknown_order_is_refused():
    with pytest.raises(UserError, match="random or streams"):
        ancestral(LANGUAGE.denoiser, LogLinear(0.0), Canvas.blank(1, 4, 3), steps=2, order="odd")
