"""Noise that belongs to a sample, and draws by it that are exact."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didi_instruct.errors import UserError
from didi_instruct.models.compile import fusing
from didi_instruct.sampling import draw as draws
from didi_instruct.sampling.draw import (
    CHUNK,
    DrawOptions,
    Purpose,
    draw_by_chunks,
    draw_tokens,
    invert,
    law_of,
    log_prob_of,
    uniforms,
)

from .toys import law

# Noise


def test_noise_is_frozen():
    """Other numbers would be other samples; the hash is of 3 seeds and 3 streams, 50 x 20 each."""
    assert uniforms(7, torch.tensor([0, 5]), (1, 3), 3).tolist() == [
        [0.6849351059484762, 0.9966565795379144, 0.08817355403465588],
        [0.5120495456549933, 0.18404035331241198, 0.026377479872312093],
    ]
    assert uniforms(-1, torch.tensor([2**40]), (6, 2, 9), 2).tolist() == [
        [0.6941283362936285, 0.9470917881416621]
    ]
    table = torch.cat(
        [
            uniforms(seed, torch.arange(50), stream, 20).flatten()
            for seed in (0, 1, 2**63 - 1)
            for stream in ((0,), (1, 4), (6, 1, 1, 30))
        ]
    )
    assert hashlib.sha256(table.numpy().tobytes()).hexdigest()[:16] == "a768a2e6be2537e9"
    names = "REVEAL TOKEN SELECT REMASK ORDER START BLOCK CODE LENGTH DROPOUT"
    assert [p.name for p in Purpose] == names.split()
    assert [int(p) for p in Purpose] == list(range(10))


@law
@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**40), min_size=1), st.data())
def test_a_sample_has_its_noise_in_any_batch_for_any_count_of_positions(seed, samples, data):
    """Also made ahead: for many steps at once, and for a step of its own at each position."""
    stream = data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=3))
    whole = uniforms(seed, torch.tensor(samples), stream, 7)
    row = data.draw(st.integers(0, len(samples) - 1))
    assert torch.equal(uniforms(seed, torch.tensor(samples[row : row + 1]), stream, 4)[0],
                       whole[row, :4])  # fmt: skip
    steps = torch.arange(5)
    many = uniforms(seed, torch.tensor(samples), (*stream, steps[:, None, None]), 7)
    each = [uniforms(seed, torch.tensor(samples), (*stream, n), 7) for n in range(5)]
    assert torch.equal(many, torch.stack(each))
    turn = torch.tensor([[0, 3, 3, 1, 4, 2, 0]]).expand(len(samples), -1)
    mixed = uniforms(seed, torch.tensor(samples), (*stream, turn), 7)
    assert torch.equal(mixed, many.gather(0, turn[None])[0])


def test_numbers_are_uniform_and_uncorrelated():
    """Kolmogorov-Smirnov at 1e-4 and a correlation bound of 4 standard errors (6e-5 each)."""
    table = uniforms(0, torch.arange(200), stream=(0,), count=500)
    n = table.numel()
    ordered = table.flatten().sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (ordered - grid).abs().max() < 2.2 / n**0.5
    assert ordered[0] >= 0
    assert ordered[-1] < 1
    centred = table - 0.5
    for a, b in [
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred, uniforms(0, torch.arange(200), stream=(1,), count=500) - 0.5),
        (centred, uniforms(1, torch.arange(200), stream=(0,), count=500) - 0.5),
    ]:
        assert (a * b).mean().abs() * 12 < 4 / a.numel() ** 0.5


@pytest.mark.gpu
def test_compiled_numbers_are_the_plain_ones():
    """Bit for bit, for seeds and streams of any size."""
    for samples, seed, stream, count in (
        (torch.arange(8), 7, (3,), 1024),
        (torch.arange(100, 164), 2**63 - 1, (1, 2), 77),
        (torch.tensor([8, 2]), -1, (0, 5, 9), 3),
        (torch.tensor([4]), 3, (1,), 5),
    ):
        with fusing(True):
            found = uniforms(seed, samples.cuda(), stream, count)
        assert torch.equal(found.cpu(), uniforms(seed, samples, stream, count))


# Laws


def test_temperature_sharpens_and_zero_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    half = law_of(logits, DrawOptions(temperature=0.5)).exp()
    torch.testing.assert_close(half, torch.softmax(logits.double() * 2, -1))
    for cold in (0.0, 1e-310):
        assert law_of(logits, DrawOptions(temperature=cold)).exp().tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    p = torch.tensor([[0.5, 0.05, 0.3, 0.15]], dtype=torch.float64)
    result = law_of(p.log(), DrawOptions(top_p=top_p)).exp()
    assert int((result > 0).sum()) == kept
    best = p.topk(kept).indices
    expected = torch.zeros_like(p).scatter(-1, best, p.gather(-1, best))
    torch.testing.assert_close(result, expected / expected.sum())


def test_top_k_keeps_k_even_of_equals_and_comes_before_top_p():
    assert int((law_of(torch.zeros(1, 5), DrawOptions(top_k=2)).exp() > 0).sum()) == 2
    result = law_of(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), DrawOptions(top_k=2)).exp()
    assert (result > 0).tolist() == [[False, False, True, True]]
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two that are left the first has 4/7, which reaches 0.5 where 0.4 would not.
    assert law_of(p, DrawOptions(top_k=2, top_p=0.5)).exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}, {"temperature": float("nan")},
     {"top_k": 0}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        DrawOptions(**settings)


# Draws


VOCABULARY, RARE = 50_000, 2e-8


def law_with_rare_tokens():
    """1,000 common tokens share almost all; each of the other 49,000 has probability 2e-8."""
    p = torch.full((VOCABULARY,), RARE, dtype=torch.float64)
    p[:1000] = (1 - RARE * (VOCABULARY - 1000)) / 1000
    return p


def test_rare_tokens_come_as_often_as_they_should():
    """All rare tokens together, and each half of them: binomial, 4 standard errors (6e-5)."""
    p, n = law_with_rare_tokens(), 4_000_000
    u = uniforms(1, torch.arange(1), (0,), n)[0]
    last = u[u >= p[:999].sum()]  # the others draw common tokens
    token, _ = draw_tokens(p.log()[None], last, torch.zeros_like(last).long())
    assert int(token.min()) == 999
    for first, end in ((1000, VOCABULARY), (1000, 25_500), (25_500, VOCABULARY)):
        mass = p[first:end].sum().item()
        count = int(((token >= first) & (token < end)).sum())
        assert abs(count - n * mass) < 4 * (n * mass * (1 - mass)) ** 0.5


def test_inversion_is_exact_at_the_edges():
    """U below the first probability gives token 0; tokens of probability 0 never come."""
    log_p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).log().expand(4, 5)
    u = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert invert(log_p, u).tolist() == [1, 1, 3, 3]


@law
@given(
    st.sampled_from([1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 300]), st.integers(0, 9),
    st.sampled_from([0.0, 1.0, 30.0]), st.integers(0, 2**30), st.booleans(),
    st.sampled_from([{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}]),
    st.sampled_from([1, 700, 2**24]), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_draw_is_the_inversion_of_the_dense_law(
    num, rows, scale, seed, shared, options, room, dtype
):
    """By chunks or dense, in parts or at once, several numbers for one row or one for each.

    A number would have to hit a border of width 1e-13 for chunks to differ.
    """
    generator, options = torch.Generator().manual_seed(seed), DrawOptions(**options)
    logits = scale * torch.randn(rows, num, generator=generator).to(dtype)
    logits[:, num // 2 + 1 :: 3] = -torch.inf
    row = torch.randint(rows, (20,), generator=generator) if shared and rows else None
    u = torch.rand(rows if row is None else 20, generator=generator, dtype=torch.float64)
    dense = logits if row is None else logits[row]
    laws = law_of(dense, options)
    expected = invert(laws, u)
    kept = draws.LAW_ELEMENTS
    try:
        draws.LAW_ELEMENTS = room
        found = [draw_tokens(logits, u, row, options)]
    finally:
        draws.LAW_ELEMENTS = kept
    if not options.restricted:
        found.append(draw_by_chunks(logits, u, row=row))
    for token, log_p in found:
        assert torch.equal(token, expected)
        torch.testing.assert_close(log_p, laws.gather(1, expected[:, None]).squeeze(1))
        torch.testing.assert_close(log_prob_of(dense, token, options), log_p)


def test_a_plain_draw_holds_no_law_over_the_vocabulary(monkeypatch):
    """All rows are drawn from at once by their sums, which are made in parts; others dense."""
    monkeypatch.setattr(draws, "LAW_ELEMENTS", 2 * 300)
    sizes = []
    monkeypatch.setattr(draws, "law_of", lambda x, o: sizes.append(len(x)) or law_of(x, o))
    logits, u = torch.randn(5, 300), torch.linspace(0, 0.99, 5, dtype=torch.float64)
    draw_tokens(logits, u, torch.arange(5))
    assert sizes == []
    draw_tokens(logits, u, torch.arange(5), DrawOptions(top_k=9))
    assert sizes == [2, 2, 1]


# Chunks


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
            token, log_p = draw_tokens(logits, numbers)
        laws = law_of(logits)
        assert torch.equal(token, invert(laws, numbers))
        torch.testing.assert_close(log_p, laws.gather(1, token[:, None]).squeeze(1))
