"""Rows against a baseline: values by hand, and how often their intervals cover the truth."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from didi_instruct.evaluation.compare import OTHER_ORDER, best_by_vsf, compare, gap_closed
from didi_instruct.evaluation.measuring import Measured
from didi_instruct.evaluation.stats import Noise, Resampling, reflected

TOKENS = 10.0


def measured(*, nats=None, entropy=None, gaps=None, nfe=8, seed=0, temperature=1.0, **more):
    """A row as it is measured: `nats` per token, `entropy` and path `gaps` of each sample."""
    count = len(next(v for v in (nats, entropy, gaps) if v is not None))
    row = {
        "model": "m", "sampler": "ancestral", "steps": nfe, "nfe": nfe, "passes": float(nfe),
        "temperature": temperature, "top_p": 1.0, "seed": seed, "num_samples": count, **more,
    }  # fmt: skip
    values = {}
    if nats is not None:
        row |= {"ppl": math.exp(nats.mean()), "entropy": entropy.mean()}
        values |= {"nats": TOKENS * nats, "tokens": np.full(count, TOKENS), "entropy": entropy}
    if gaps is not None:
        row["path_kl"] = gaps.mean()
        values["path_gap"] = gaps
    return Measured(row, values)


def normal(generator, mean, shared, spread=0.5):
    return mean + shared + spread * generator.normal(size=len(shared))


def data_set(seed, count=100):
    """A student and a teacher (two settings with few steps, one with many) that share noise.

    Path KL: 4 against 5 or 6 and 3, so half of the gap. Nats per token: 1.7 at entropy 4.5, where
    the line from (4, 1) to (5, 3) has 2, so a ratio of exp(-0.3).
    """
    generator = np.random.default_rng(seed)
    shared = 2 * generator.normal(size=count)

    def make(gap, nats, entropy, **settings):
        return measured(
            gaps=normal(generator, gap, shared),
            nats=normal(generator, nats, 0.1 * shared),
            entropy=normal(generator, entropy, 0.0 * shared),
            **settings,
        )

    student = make(4.0, 1.7, 4.5)
    teacher = [make(5.0, 3.0, 5.0), make(6.0, 1.0, 4.0, temperature=0.7)]
    return student, [*teacher, make(3.0, 0.5, 3.0, nfe=64)]


def test_the_gap_closed_is_zero_for_the_teacher_and_one_for_all_its_steps():
    own, many = np.array([5.0, 3.0, 4.5, 6.0, 4.0, 4.0]), np.array([3.0, 3.0, 3.0, 3.0, 5.0, 6.0])
    expected = [0, 1, 0.25, -0.5, math.nan, math.nan]
    np.testing.assert_array_equal(gap_closed(np.full(6, 5.0), own, many), expected)


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(st.integers(0, 2**32), st.randoms())
def test_neither_the_order_of_rows_nor_their_names_matter(seed, random):
    """Rows of several samplers, seeds and settings, some without nats or paths or numbers of each.

    Names are hashes, so a row knows its sampler by equality alone.
    """
    generator = np.random.default_rng(seed)

    def some(count):
        for _ in range(count):
            nfe, own = (int(generator.choice(v)) for v in ([8, 8, 64], [0, 1]))
            row = measured(
                nats=generator.normal(2, 0.5, 12) if generator.random() < 0.8 else None,
                entropy=generator.normal(4, 0.5, 12),
                gaps=generator.normal(5 - own, 1, 12) if generator.random() < 0.8 else None,
                nfe=nfe, seed=own, fingerprint=str(generator.choice(["a", "b"])),
                temperature=float(generator.choice([0.7, 0.8, 0.9, 1.0])),
            )  # fmt: skip
            yield row if generator.random() < 0.9 else replace(row, values={})

    def renamed(each):
        name = {"a": "b", "b": "c"}[each.row["fingerprint"]]
        return replace(each, row=each.row | {"fingerprint": name})

    rows, baseline = list(some(3)), list({m.row["temperature"]: m for m in some(5)}.values())
    found = compare(rows, baseline, most_steps=64)
    order = random.sample(range(3), 3)
    others = [renamed(each) for each in random.sample(baseline, len(baseline))]
    again = compare([renamed(rows[k]) for k in order], others, most_steps=64)
    for k, row in zip(order, again, strict=True):
        assert row | {"fingerprint": ""} == found[k] | {"fingerprint": ""}


def test_the_intervals_cover_the_truth():
    """400 data sets of 100 samples, at least 90% and at most 98.5% of intervals cover.

    A bootstrap interval of 100 samples covers with 94 to 95%, of which 400 leave a standard error
    of 1.2%: below 90% are more than 3.5 sigmas from 94.4%, above 98.5% as many from 95%, a
    false-alarm rate of 4e-4 for each of the three.
    """
    truth = {"gap_closed": 0.5, "path_kl_vs_baseline": -1.0, "vsf": math.exp(-0.3)}
    covered = dict.fromkeys(truth, 0)
    for seed in range(400):
        student, teacher = data_set(seed)
        (row,) = compare([student], teacher, most_steps=64, seed=seed)
        for name, value in truth.items():
            low, high = row[f"{name}_ci95"]
            covered[name] += low < value < high
            assert low < row[name] < high
    for name, count in covered.items():
        assert 0.90 < count / 400 < 0.985, (name, count)


def test_a_choice_among_equal_settings_is_allowed_for():
    """200 teachers of 11 equal settings, the worst case: the best is lucky, so the value is low.

    Plain percentiles of the resamples cover half of the time; reflected, 87%, measured on 3,000
    such data sets. Above 79% is 3.6 sigmas from that: a false-alarm rate of 2e-4.
    """
    covered, values = 0, []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        shared = 2 * generator.normal(size=100)
        teacher = [
            measured(gaps=normal(generator, gap, shared), nfe=nfe, temperature=1 - k / 20)
            for gap, nfe in ((5.0, 8), (3.0, 64))
            for k in range(11)
        ]
        student = measured(gaps=normal(generator, 4.0, shared))
        (row,) = compare([student], teacher, most_steps=64, seed=seed)
        low, high = row["gap_closed_ci95"]
        covered += low < 0.5 < high
        values.append(row["gap_closed"])
    assert np.mean(values) < 0.48
    assert covered / 200 > 0.79


def test_shared_noise_makes_a_difference_sharp():
    """Own noise of 0.5 in each leaves √(0.5 / 100); apart, the shared 2 stays in: √(8.5 / 100).

    Standard deviations of 100 samples are known to 7%, so 30% is 4 sigmas.
    """
    student, teacher = data_set(0)
    (together,) = compare([student], teacher)
    alone = Measured(student.row | {"seed": 1}, student.values)
    (apart,) = compare([alone], teacher)
    for row, error in ((together, 0.0707), (apart, 0.2915)):
        assert row["path_kl_vs_baseline_se"] == pytest.approx(error, rel=0.3)
        low, high = row["path_kl_vs_baseline_ci95"]
        assert (high - low) / 3.92 == pytest.approx(error, rel=0.3)
        assert row["path_kl_vs_baseline_at"] == [1.0, 1.0]
    assert together["path_kl_vs_baseline"] == apart["path_kl_vs_baseline"]


def test_the_best_setting_is_chosen_in_every_resample():
    generator = np.random.default_rng(5)
    gaps = generator.normal(5, 2, size=(5, 40))
    few = [measured(gaps=gaps[0]), measured(gaps=gaps[1], temperature=0.9)]
    many = [measured(gaps=gaps[2] - 3, nfe=64)]
    ours = [measured(gaps=gaps[3] - 1), measured(gaps=gaps[4] - 1, temperature=0.9)]
    found = compare(ours, [*few, *many], most_steps=64, seed=7)

    resampling, noise = Resampling(7), Noise(0, 40)
    a, b, c, d, e = (resampling.means(row, noise) for row in gaps)
    teacher, best = np.minimum(a, b), np.minimum(d - 1, e - 1)
    chosen = min(gaps[0].mean(), gaps[1].mean())
    gap = teacher - (c - 3)
    assert found[0]["gap_closed_ci95"] == pytest.approx(
        reflected(found[0]["gap_closed"], (teacher - (d - 1)) / gap)
    )
    lowest = min(row["path_kl"] for row in found)
    for row in found:
        assert row["path_kl_best"] == lowest
        assert row["path_kl_best_ci95"] == pytest.approx(reflected(lowest, best))
    difference = found[1]["path_kl_vs_baseline"]
    assert difference == pytest.approx(gaps[4].mean() - 1 - chosen)
    assert found[1]["path_kl_vs_baseline_ci95"] == pytest.approx(
        reflected(difference, e - 1 - teacher)
    )
    for row in found:
        assert row["gap_closed_best"] == max(r["gap_closed"] for r in found)
        assert row["gap_closed_best_ci95"] == pytest.approx(
            reflected(row["gap_closed_best"], (teacher - best) / gap)
        )


def test_where_resamples_leave_the_frontier_there_is_a_value_but_no_interval():
    """The student's entropy is the teacher's highest: nearly half of the resamples lie above."""
    generator = np.random.default_rng(0)
    spread = generator.normal(size=(3, 200))
    nats = np.full(200, 2.0)
    teacher = [
        measured(nats=nats, entropy=5 + spread[0], seed=1),
        measured(nats=nats, entropy=3 + spread[1], seed=2, temperature=0.5),
    ]
    edge = 5 + spread[0].mean() - 1e-3
    student = measured(nats=nats, entropy=edge + spread[2] - spread[2].mean())
    (row,) = compare([student], teacher)
    assert row["vsf"] == pytest.approx(1.0)
    assert row["vsf_ci95"] is None
    assert "no interval: the baseline's frontier reaches in" in row["vsf_note"]
    inside = measured(nats=nats, entropy=4 + spread[2])
    (row,) = compare([inside], teacher)
    assert row["vsf_ci95"] == pytest.approx([1.0, 1.0])
    assert "vsf_note" not in row


def test_a_gap_that_may_be_none_has_no_interval():
    gaps = np.random.default_rng(0).normal(5, 1, size=(3, 50))
    gaps -= gaps.mean(1, keepdims=True)
    few, many = measured(gaps=gaps[0] + 5), measured(gaps=gaps[1] + 4.99, nfe=64, seed=1)
    (row,) = compare([measured(gaps=gaps[2] + 5)], [few, many], most_steps=64)
    assert row["gap_closed"] == pytest.approx(0.0, abs=1e-9)
    assert row["gap_closed_ci95"] is None
    assert "few steps cost the baseline something in" in row["gap_closed_note"]
    (row,) = compare([few], [few, measured(gaps=gaps[1] + 6, nfe=64)], most_steps=64)
    assert (row["gap_closed"], row["gap_closed_ci95"]) == (None, None)
    assert "no gap to close" in row["gap_closed_note"]


def test_what_the_baseline_does_not_have_is_not_made_up():
    generator = np.random.default_rng(0)
    low, high = (measured(nats=generator.normal(3, 1, 20), entropy=np.full(20, h)) for h in (3, 5))
    (row,) = compare([high], [low])
    assert (row["vsf"], row["vsf_ci95"]) == (None, None)
    assert row["vsf_note"] == "vsF needs a sweep of the baseline (didi eval --frontier)"
    swept = measured(nats=generator.normal(3, 1, 20), entropy=np.full(20, 4))
    swept.row["temperature"] = 0.9
    (row,) = compare([high], [low, swept])
    assert "above all that the baseline reaches" in row["vsf_note"]
    student = measured(gaps=generator.normal(size=20))
    (row,) = compare([student], [low], most_steps=64)
    assert "path_kl_vs_baseline" not in row
    assert row["gap_closed_note"] == "the baseline has no path KL with 8 NFE"
    (row,) = compare([student], [student], most_steps=64)
    assert row["gap_closed_note"] == "the baseline has no path KL with 64 steps"
    assert compare([student], [], most_steps=64) == [student.row]


def test_few_steps_are_matched_by_what_a_sampler_really_takes():
    """A row that was asked for 8 steps but took 32 is not measured against 8 of the baseline's."""
    gaps = np.random.default_rng(0).normal(5, 1, size=20)
    asked = measured(gaps=gaps - 2, nfe=32)
    asked.row["steps"] = 8
    teacher = [
        measured(gaps=gaps),
        measured(gaps=gaps - 1, nfe=32),
        measured(gaps=gaps - 3, nfe=64),
    ]
    (row,) = compare([asked], teacher, most_steps=64)
    assert row["path_kl_vs_baseline"] == pytest.approx(-1)
    assert row["path_kl_vs_baseline_ci95"] == pytest.approx([-1, -1])
    assert row["gap_closed"] == pytest.approx(0.5)


def test_one_sample_has_values_and_no_interval():
    one = measured(nats=np.array([2.0]), entropy=np.array([4.0]), gaps=np.array([3.0]))
    many = measured(gaps=np.array([1.0]), nfe=64)
    (row,) = compare([one], [one, many], most_steps=64)
    assert (row["vsf"], row["gap_closed"], row["path_kl_vs_baseline"]) == (1.0, 0.0, 0.0)
    names = ("vsf_ci95", "gap_closed_ci95", "path_kl_vs_baseline_ci95", "path_kl_vs_baseline_se")
    assert [row[name] for name in names] == [None] * 4


def test_the_best_setting_is_one_of_the_same_sampler():
    """Other weights, options, seeds or numbers of samples are not settings to choose from."""
    gaps = np.random.default_rng(0).normal(5, 1, size=20)
    gaps += 5 - gaps.mean()
    own = {"fingerprint": "a", "options": {"grid": "uniform"}}
    teacher = [measured(gaps=gaps), measured(gaps=gaps - 4, nfe=64)]
    rows = [
        measured(gaps=gaps - 1, **own),
        measured(gaps=gaps - 2, temperature=0.9, **own),
        measured(gaps=gaps - 3, **own | {"fingerprint": "b"}),
        measured(gaps=gaps - 3, **own | {"options": {"grid": "cosine"}}),
        measured(gaps=gaps - 3, sampler="confidence", **own),
        measured(gaps=gaps - 3, seed=1, **own),
        measured(gaps=np.append(gaps, 5.0) - 3, **own),
        measured(gaps=gaps - 3, nfe=64, **own),
    ]
    found = compare(rows, teacher, most_steps=64)
    assert [row["gap_closed"] for row in found[:2]] == pytest.approx([0.25, 0.5])
    assert [row["gap_closed_best"] for row in found[:2]] == pytest.approx([0.5, 0.5])
    assert [row["gap_closed_best"] for row in found[2:7]] == pytest.approx([0.75] * 5)
    assert [row["path_kl_best"] for row in found] == pytest.approx(
        [3, 3, 2, 2, 2, 2, rows[6].row["path_kl"], 2]
    )
    assert [row["path_kl_best_at"] for row in found[:3]] == [[0.9, 1.0], [0.9, 1.0], [1.0, 1.0]]


def test_passes_compare_only_within_reach_and_in_equal_batches():
    """A guided row of 36 passes beside a baseline of 16: no; beside one of 32: yes.

    Texts that are drawn together share passes.
    """
    generator = np.random.default_rng(0)

    def row(passes, **more):
        nats = generator.normal(2, 0.1, 20)
        return measured(nats=nats, entropy=np.full(20, 5.0), passes=passes, **more)

    guided, few, enough = row(36.0), row(16.0), row(32.0, nfe=32)
    (found,) = compare([guided], [few])
    assert found["vsf"] is not None
    assert (found["vsf_passes"], found["vsf_passes_ci95"]) == (None, None)
    assert "took 36 passes" in found["vsf_passes_note"]
    (found,) = compare([guided], [few, enough])
    assert found["vsf_passes"] == pytest.approx(guided.row["ppl"] / enough.row["ppl"])
    rows = compare([row(8.0, batch_size=n) for n in (64, 1, None)], [row(8.0, batch_size=64)])
    assert rows[0]["vsf_passes"] == rows[0]["vsf"]
    assert [bool(row["vsf"]) and row["vsf_passes"] for row in rows[1:]] == [None, None]
    assert "drawn in batches of 1 and the baseline in batches of 64" in rows[1]["vsf_passes_note"]
    assert "drawn in batches that are not known" in rows[2]["vsf_passes_note"]


def test_bounds_of_another_order_have_a_note():
    """In random order path KL is the divergence and what a text tells of its order."""
    gaps = np.random.default_rng(0).normal(5, 1, size=20)
    at_random, in_streams = {"options": {"order": "random"}}, {"options": {"order": "streams"}}
    plain = [measured(gaps=gaps, **at_random), measured(gaps=gaps - 4, nfe=64)]
    streams = [measured(gaps=gaps - 1, **in_streams), measured(gaps=gaps - 4, nfe=64)]
    columns = ("path_kl_vs_baseline", "gap_closed", "gap_closed_best")
    for row, baseline, noted in (
        (measured(gaps=gaps - 2), plain, [None] * 3),
        (measured(gaps=gaps - 2, **in_streams), plain, [OTHER_ORDER] * 3),
        (measured(gaps=gaps - 2, **in_streams), streams, [None, OTHER_ORDER, OTHER_ORDER]),
    ):
        (found,) = compare([row], baseline, most_steps=64)
        assert [found.get(f"{name}_note") for name in columns] == noted
        assert found["gap_closed"] is not None, "a note takes nothing away"


def test_a_row_without_path_kl_closes_no_gap():
    gaps = np.random.default_rng(0).normal(5, 1, size=20)
    cut = measured(gaps=gaps)
    cut.row.update(path_kl=None, path_kl_note="too long")
    (row,) = compare([cut], [measured(gaps=gaps), measured(gaps=gaps - 1, nfe=64)], most_steps=64)
    for name in ("gap_closed", "gap_closed_best", "path_kl_vs_baseline"):
        assert (row[name], row[f"{name}_ci95"]) == (None, None)
        assert row[f"{name}_note"] == "this row has no path KL"


def line(entropy):
    """Nats per token of the baseline at an entropy."""
    return entropy - 3.0


def flat(nats_even, nats_odd, entropy, **settings):
    """A row of 20 samples whose even and odd ones differ."""
    nats = np.where(np.arange(20) % 2, nats_odd, nats_even)
    return measured(nats=nats, entropy=np.full(20, entropy), **settings)


BASELINE = [
    flat(line(5.0), line(5.0), 5.0),
    flat(line(4.0), line(4.0), 4.0, temperature=0.5),
]


def test_one_half_chooses_and_the_other_tells():
    """The even samples prefer 0.8, by 0.3 nats to 0.1; the odd ones say that it loses 0.2."""
    rows = [
        flat(line(4.8) - 0.1, line(4.8) - 0.4, 4.8),
        flat(line(4.6) - 0.3, line(4.6) + 0.2, 4.6, temperature=0.8),
        flat(line(4.6) - 0.5, line(4.6) - 0.5, 4.6, temperature=0.8, sampler="other"),
    ]
    found = best_by_vsf(rows, BASELINE)
    assert [row["vsf_best"] for row in found] == pytest.approx(
        [math.exp(0.2), math.exp(0.2), math.exp(-0.5)]
    )
    assert [row["vsf_best_at"] for row in found] == [[0.8, 1.0]] * 3
    low, high = found[0]["vsf_best_ci95"]
    assert (low, high) == pytest.approx((math.exp(0.2), math.exp(0.2))), "no spread in a half"


def test_where_nothing_can_be_compared_nothing_is_chosen():
    beyond = flat(2.0, 2.0, 6.0)
    (row,) = best_by_vsf([beyond], BASELINE)
    assert (row["vsf_best"], row["vsf_best_ci95"]) == (None, None)
    assert "no setting has a vsF" in row["vsf_best_note"]
    alone = measured(gaps=np.arange(20.0))
    assert best_by_vsf([alone], BASELINE)[0]["vsf_best"] is None
    one = measured(nats=np.array([1.0]), entropy=np.array([4.5]))
    assert best_by_vsf([one], BASELINE)[0]["vsf_best"] is None


def test_a_best_setting_that_gains_nothing_has_no_gain():
    """80 samplers of 6 settings on the baseline's own line: the mean of log vsF is 0.

    With noise of 0.3 nats and 20 samples in a half, a mean of 80 has a standard error of
    0.3 / sqrt(20 · 80) = 0.0075: 0.03 is 4 sigmas, a false-alarm rate of 6e-5. Chosen and told on
    all samples the lowest of 6 lies 1.27 of 0.3 / sqrt(40), or 0.06, below.
    """
    honest, lucky = [], []
    for seed in range(80):
        generator = np.random.default_rng(seed)
        rows = [
            measured(
                nats=generator.normal(line(4.5), 0.3, 40),
                entropy=np.full(40, 4.5),
                temperature=1 - n / 20,
            )
            for n in range(6)
        ]
        honest.append(math.log(best_by_vsf(rows, BASELINE, seed)[0]["vsf_best"]))
        if seed < 20:
            lucky.append(math.log(min(row["vsf"] for row in compare(rows, BASELINE))))
    assert abs(np.mean(honest)) < 0.03
    assert np.mean(lucky) < -0.04
