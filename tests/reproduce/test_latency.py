"""Timing: in turns, without the first time, medians; and beside the quality of the same."""

import pytest

from didi_instruct.errors import UserError
from didi_instruct.evaluation.judges import OracleJudge
from didi_instruct.reproduce import latency
from didi_instruct.reproduce.equal_terms import Setting, Terms, measure
from didi_instruct.reproduce.latency import interleaved, latency_rows, time_settings

from .small_models import LANGUAGE, config_of, save


class Clock:
    """Time that passes only when something is drawn."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def draw(self, name, seconds):
        waiting = iter(seconds)

        def run(seed):
            self.calls.append((name, seed))
            self.now += next(waiting)
            return 100

        return run


def test_all_take_turns_and_the_first_time_does_not_count(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)
    found = interleaved([clock.draw("a", [99, 1, 3, 2]), clock.draw("b", [50, 4, 4, 7])], 3)
    assert found == [[(1, 100), (3, 100), (2, 100)], [(4, 100), (4, 100), (7, 100)]]
    turns = [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert clock.calls == [("a", 0), ("b", 0), *turns]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    ar = save(folder / "ar", config_of("ar"))
    teacher = save(folder / "teacher", config_of())
    return [
        Setting(method="AR", source=ar, more={"role": "ar"}),
        Setting(method="MDLM", source=teacher, steps=4),
    ]


def test_numbers_of_a_row_follow_from_its_seconds(settings, monkeypatch):
    """By hand: medians of 2 and 4 s for a batch of 4 texts of 32 tokens."""
    seconds = iter([2.0, 4.0, 4.0, 3.0, 1.0, 4.0])  # AR, MDLM; MDLM, AR; AR, MDLM
    clock = iter([t for n, s in enumerate(seconds) for t in (100.0 * n, 100.0 * n + s)])
    monkeypatch.setattr(latency.time, "perf_counter", lambda: next(clock))
    ar, mdlm = time_settings(settings, batch=4, rounds=3, device="cpu")
    assert (ar["seconds_median"], mdlm["seconds_median"]) == (2, 4)
    assert ar["seconds_range"] == [1, 3]
    assert (ar["seconds_per_sample"], mdlm["seconds_per_sample"]) == (0.5, 1)
    assert (ar["tokens_per_second"], mdlm["tokens_per_second"]) == (64, 32)
    assert (ar["seconds_per_1k"], mdlm["seconds_per_1k"]) == (16, 32)
    assert (ar["ratio_to_first"], mdlm["ratio_to_first"]) == (1, 0.5)
    assert (ar["role"], mdlm["steps"], mdlm["rounds"]) == ("ar", 4, 3)


def test_more_steps_take_longer(settings):
    """Eight times the steps take at least half as long again, on a busy machine too."""
    few, many = settings[1], Setting(method="more", source=settings[1].source, steps=32)
    rows = time_settings([few, many], batch=2, rounds=3, device="cpu")
    assert rows[1]["seconds_median"] > 1.5 * rows[0]["seconds_median"]


def test_quality_is_that_of_the_same_settings(settings, tmp_path):
    terms = Terms(out=tmp_path, judge=OracleJudge(LANGUAGE), num=6, device="cpu", seed=3)
    rows = latency_rows(settings, terms, batch=2, rounds=1)
    for row, other in zip(rows, measure(settings, terms).rows, strict=True):
        for name in ("ppl", "entropy", "nfe", "passes", "num_samples", "seed"):
            assert row[name] == other[name]
        assert row["tokens_per_second"] > 0
    assert [row["nfe"] for row in rows] == [32, 4]


def test_nothing_to_time_is_refused(settings):
    with pytest.raises(UserError, match="name a model"):
        time_settings([])
    with pytest.raises(UserError, match="rounds"):
        time_settings(settings, rounds=0, device="cpu")
