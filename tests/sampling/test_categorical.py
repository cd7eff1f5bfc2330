import pytest
import torch

from didi_instruct.errors import UserError
from didi_instruct.sampling.categorical import draw, restrict
from didi_instruct.sampling.noise import uniforms


def test_frequencies_match_the_law():
    """Chi-square with 4 degrees of freedom at a false-alarm rate of 1e-4 (critical value 23.5)."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    n = 100_000
    u = uniforms(0, torch.arange(1), (0,), n)[0]
    counts = torch.bincount(draw(p.log().expand(n, 5), u), minlength=5)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 23.5


def test_inversion_is_exact_at_the_edges():
    """U below the first probability gives token 0; tokens of probability 0 never come."""
    log_p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).log().expand(4, 5)
    u = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert draw(log_p, u).tolist() == [1, 1, 3, 3]


def test_temperature_sharpens_and_zero_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    torch.testing.assert_close(
        restrict(logits, temperature=0.5).exp(), torch.softmax(logits.double() * 2, -1)
    )
    assert restrict(logits, temperature=0.0).exp().tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    p = torch.tensor([[0.5, 0.05, 0.3, 0.15]], dtype=torch.float64)
    result = restrict(p.log(), top_p=top_p).exp()
    assert int((result > 0).sum()) == kept
    assert result.sum().item() == pytest.approx(1)
    best = p.topk(kept).indices
    torch.testing.assert_close(
        result.gather(-1, best), p.gather(-1, best) / p.gather(-1, best).sum()
    )


def test_top_k_keeps_k():
    result = restrict(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), top_k=2).exp()
    assert (result > 0).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        restrict(torch.zeros(1, 3), **settings)
