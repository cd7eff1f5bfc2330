"""Draws by chunks are those of the plain exact draw."""

import pytest
import torch

from didi_instruct.models.compile import fusing
from didi_instruct.sampling.categorical import draw, restrict
from didi_instruct.sampling.chunks import CHUNK, chunk_sums, draw_by_chunks, draw_compiled

from .enumeration import assert_follows


@pytest.mark.parametrize("num", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 1000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_tokens_and_probabilities_are_those_of_the_plain_draw(num, scale):
    """From the same numbers; 300 of them would have to hit a border of width 1e-13 to differ."""
    generator = torch.Generator().manual_seed(num)
    logits = scale * torch.randn(300, num, generator=generator)
    logits[:, num // 2 + 1 :: 3] = -torch.inf
    numbers = torch.rand(300, generator=generator, dtype=torch.float64)
    token, log_p = draw_by_chunks(logits, numbers)
    law = restrict(logits)
    assert torch.equal(token, draw(law, numbers))
    torch.testing.assert_close(log_p, law.gather(1, token[:, None]).squeeze(1))


def test_sums_are_those_of_the_softmax():
    logits = 5 * torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    top, sums = chunk_sums(logits)
    assert sums.shape == (7, -(-300 // CHUNK))
    whole = torch.logsumexp(logits.double(), 1)
    torch.testing.assert_close(top.squeeze(1) + sums.sum(1).log(), whole)


def test_sums_that_fall_never_lead_to_the_impossible(monkeypatch):
    """As a scan in parallel makes them: less behind the last token than at it."""
    cumsum = torch.Tensor.cumsum

    def falling(values, dim):
        fallen = torch.arange(values.shape[dim]) * 1e-3
        return torch.where(values > 0, cumsum(values, dim), cumsum(values, dim) - fallen)

    monkeypatch.setattr(torch.Tensor, "cumsum", falling)
    logits = torch.full((2000, 6 * CHUNK), -torch.inf)
    logits[:, [3, 2 * CHUNK + 1, 2 * CHUNK + 9]] = 0.0
    numbers = torch.linspace(0, 1 - 2.0**-53, 2000, dtype=torch.float64)
    token, log_p = draw_by_chunks(logits, numbers)
    assert set(token.tolist()) == {3, 2 * CHUNK + 1, 2 * CHUNK + 9}
    assert log_p.isfinite().all()


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_extreme_numbers_never_draw_the_impossible(u):
    """First and last token that can be; -inf at both ends, and tails that vanish in float64."""
    logits = torch.full((4, 3 * CHUNK), -torch.inf)
    logits[0, 40:90] = 0.0
    logits[1, [7, CHUNK + 5, 2 * CHUNK + 9]] = torch.tensor([0.0, -800.0, -5000.0])
    logits[2, CHUNK] = 3.0
    logits[3, 1:-1] = torch.linspace(20, -20, 3 * CHUNK - 2)
    token, log_p = draw_by_chunks(logits, torch.full((4,), u, dtype=torch.float64))
    p = logits.double().softmax(-1)
    assert bool((p.gather(1, token[:, None]) > 0).all())
    assert bool(log_p.isfinite().all())
    ends = [[40, 7, CHUNK, 1], [89, 7, CHUNK, 3 * CHUNK - 2]]
    assert token.tolist()[:3] == ends[u > 0.5][:3]


def test_draws_follow_their_law():
    """Chi-square over 300 tokens, false alarm 1e-5; in bfloat16, as a network gives them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 300, generator=generator).bfloat16()
    numbers = torch.rand(60_000, generator=generator, dtype=torch.float64)
    token, _ = draw_by_chunks(logits.expand(60_000, 300), numbers)
    assert_follows(token[:, None], logits[0].double().softmax(0), 300)


def test_several_numbers_may_draw_from_one_row():
    """In any order; rows from which nobody draws are left alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 300, generator=generator)
    row = torch.randint(4, (40,), generator=generator)
    numbers = torch.rand(40, generator=generator, dtype=torch.float64)
    expected = draw_by_chunks(logits[row], numbers)
    for found in (draw_by_chunks(logits, numbers, row=row), draw_compiled(logits, numbers, row)):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_no_row_is_no_token():
    token, log_p = draw_by_chunks(torch.empty(0, 300), torch.empty(0, dtype=torch.float64))
    assert token.shape == log_p.shape == (0,)


def test_what_is_not_a_number_stays_none():
    _, log_p = draw_by_chunks(torch.full((2, 5), torch.nan), torch.rand(2, dtype=torch.float64))
    assert bool(log_p.isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num", [37, 50_257])
def test_compiled_draws_are_the_plain_ones(num):
    """Rows of all counts, one alone too, in bfloat16 and with a stride."""
    generator = torch.Generator("cuda").manual_seed(0)
    for rows in (300, 17, 1, 333):
        wide = 3 * torch.randn(rows, num + 15, generator=generator, device="cuda")
        logits = wide.bfloat16()[:, :num]
        numbers = torch.rand(rows, generator=generator, device="cuda", dtype=torch.float64)
        with fusing(True):
            token, log_p = draw_compiled(logits, numbers)
        law = restrict(logits)
        assert torch.equal(token, draw(law, numbers))
        torch.testing.assert_close(log_p, law.gather(1, token[:, None]).squeeze(1))
