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


RARE, VOCABULARY = 2e-8, 50_000


def law_with_rare_tokens():
    """1,000 common tokens share almost all; each of the other 49,000 has probability 2e-8."""
    p = torch.full((VOCABULARY,), RARE, dtype=torch.float64)
    p[:1000] = (1 - RARE * (VOCABULARY - 1000)) / 1000
    return p


def test_rare_tokens_come_as_often_as_they_should():
    """All rare tokens together, and each half of them: binomial, 4 standard errors (6e-5)."""
    p = law_with_rare_tokens()
    n = 4_000_000
    token = draw(p.log()[None], uniforms(1, torch.arange(1), (0,), n)[0])
    for first, last in ((1000, VOCABULARY), (1000, 25_500), (25_500, VOCABULARY)):
        mass = p[first:last].sum().item()
        count = int(((token >= first) & (token < last)).sum())
        assert abs(count - n * mass) < 4 * (n * mass * (1 - mass)) ** 0.5


@pytest.mark.slow
def test_float32_gumbel_noise_would_fail():
    """10,000 draws expect 9.8 rare tokens; with 24-bit uniforms almost none come (chance 6e-4)."""
    logits = law_with_rare_tokens().log().float()
    generator = torch.Generator().manual_seed(0)
    rare = 0
    for _ in range(100):
        u = torch.rand(100, VOCABULARY, generator=generator).clamp_(min=1e-20)
        token = (logits - u.log_().neg_().log_()).argmax(-1)
        rare += int((token >= 1000).sum())
    assert rare <= 1


def test_a_shared_law_draws_like_its_copies():
    log_p = torch.randn(1, 7, dtype=torch.float64).log_softmax(-1)
    u = uniforms(0, torch.arange(1), (0,), 50)[0]
    assert torch.equal(draw(log_p, u), draw(log_p.expand(50, 7), u))


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


def test_top_k_keeps_k_even_of_equals():
    assert int((restrict(torch.zeros(1, 5), top_k=2).exp() > 0).sum()) == 2


def test_greedy_does_not_choose_among_no_numbers():
    assert restrict(torch.tensor([[1.0, float("nan")]]), temperature=0.0).isnan().any()
    assert restrict(torch.tensor([[1.0, 2.0]]), temperature=1e-310).exp().tolist() == [[0.0, 1.0]]


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
