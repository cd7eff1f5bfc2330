"""What is timed, in which order, and what becomes of it."""

import json
import time

import pytest
import torch

from didi_instruct.benchmarking import timing
from didi_instruct.benchmarking.bench import Bench, make_rows
from didi_instruct.benchmarking.timing import Case, Timing, covered, time_cases
from didi_instruct.cli.bench import cells, notes
from didi_instruct.errors import UserError

CPU = torch.device("cpu")


def case(name, run=lambda seed: None, **shape):
    return Case(name=name, run=run, **({"batch": 2, "length": 8, "steps": 4} | shape))


def test_rounds_take_turns_and_the_warm_up_is_not_timed(monkeypatch):
    """A clock that each run moves by a known amount; the first run of each takes a year."""
    now, seen = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def runs(name, seconds):
        left = iter([3e7, *seconds])

        def run(seed):
            seen.append((name, seed))
            now[0] += next(left)

        return case(name, run)

    told = []
    found = time_cases(
        [runs("a", [3.0, 1.0, 2.0]), runs("b", [5.0, 5.0, 6.0])],
        3,
        CPU,
        lambda done, total: told.append((done, total)),
    )
    assert [name for name, _ in seen] == ["a", "b"] * 4
    assert [seed for _, seed in seen] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert [t.seconds for t in found] == [[3.0, 1.0, 2.0], [5.0, 5.0, 6.0]]
    assert [t.median for t in found] == [2.0, 5.0]
    assert told[0] == (0, 8)
    assert told[-1] == (8, 8)
    assert found[0].peak is None


def test_what_fails_is_left_out_and_says_why():
    tries = []

    def run(seed):
        tries.append(seed)
        raise RuntimeError("CUDA out of memory.\nTried to allocate 20.00 GiB")

    cases = [case("fits"), case("large", run)]
    found = time_cases(cases, 3, CPU)
    assert len(tries) == 1
    rows = make_rows(cases, found)
    assert rows[0]["note"] is None
    assert rows[1]["note"] == "CUDA out of memory"
    assert rows[1]["seconds_median"] is rows[1]["ratio_to_first"] is None
    assert notes(rows) == ["large did not run: CUDA out of memory"]
    assert set(list(cells(rows[1], busy=True).values())[4:]) == {"-"}


def test_no_failure_takes_other_rows_with_it():
    """Whatever is raised; but what the user can mend is said instead."""

    def fail(error):
        def run(seed):
            raise error

        return run

    errors = [KeyError("cache"), AttributeError("no such thing"), AssertionError()]
    cases = [case("fits"), *(case("other", fail(error)) for error in errors)]
    rows = make_rows(cases, time_cases(cases, 1, CPU))
    assert [row["note"] for row in rows] == [None, "'cache'", "no such thing", "AssertionError"]
    with pytest.raises(UserError, match="mend"):
        time_cases([case("wrong", fail(UserError("mend it")))], 1, CPU)


def test_what_is_too_large_to_be_built_is_a_row_that_did_not_run():
    built = Case.impossible("huge", 2, 8, 4, MemoryError())
    cases = [case("fits"), built, case("hungry", lambda seed: bytearray(2**62))]
    rows = make_rows(cases, time_cases(cases, 1, CPU))
    assert [row["note"] for row in rows] == [None, "MemoryError", "MemoryError"]
    assert [row["seconds_median"] is None for row in rows] == [False, True, True]


def test_steps_are_those_that_a_run_took():
    """What was expected counts only where no run says otherwise, as of a failed one."""
    cases = [case("told", lambda seed: 10), case("silent"), case("other", lambda seed: {"a": 1})]
    rows = make_rows(cases, time_cases(cases, 1, CPU))
    assert [row["steps"] for row in rows] == [10, 4, 4]
    assert rows[0]["ms_per_step"] == pytest.approx(100 * rows[0]["seconds_median"])


def test_a_remark_is_told_once_and_gives_way_to_a_failure():
    def fail(seed):
        raise RuntimeError("no memory")

    cases = [case("a", note="is slow"), case("a", note="is slow"), case("b", fail, note="too")]
    rows = make_rows(cases, time_cases(cases, 1, CPU))
    assert [row["note"] for row in rows] == ["is slow", "is slow", "no memory"]
    assert notes(rows) == ["a: is slow", "b did not run: no memory"]


def test_rows_are_the_contract(tmp_path):
    cases = [case("ours"), case("other", batch=4, length=10, steps=2)]
    found = [Timing([0.2, 0.1, 0.4], 2**29), Timing([1.0])]
    rows = make_rows(cases, found)
    contract = ["name", "batch", "length", "steps", "seconds_median", "tokens_per_second"]
    contract += ["ms_per_step", "peak_memory_gib", "ratio_to_first"]
    assert {name: rows[0][name] for name in contract} == {
        "name": "ours",
        "batch": 2,
        "length": 8,
        "steps": 4,
        "seconds_median": 0.2,
        "tokens_per_second": pytest.approx(80),
        "ms_per_step": pytest.approx(50),
        "peak_memory_gib": 0.5,
        "ratio_to_first": 1.0,
    }
    assert rows[1]["ratio_to_first"] == pytest.approx(5)
    assert rows[1]["tokens_per_second"] == pytest.approx(40)
    assert rows[1]["peak_memory_gib"] is None
    Bench("m", rows, {"device": "CPU"}).write(tmp_path / "b.json")
    report = json.loads((tmp_path / "b.json").read_text())
    assert report == {"model": "m", "rows": rows, "device": "CPU"}


def test_time_that_is_covered_twice_counts_once():
    assert covered([(4, 6), (0, 2), (1, 3), (1, 2), (6, 7)]) == 6
    assert covered([]) == 0


def test_a_busy_share_is_shown_where_it_was_asked_for():
    rows = make_rows([case("ours"), case("other")], [Timing([0.2], busy=0.19), Timing([0.4])])
    assert [row["gpu_busy"] for row in rows] == [pytest.approx(0.95), None]
    assert [cells(row, busy=True)["busy"] for row in rows] == ["95%", "-"]
    assert "busy" not in cells(rows[0], busy=False)


@pytest.mark.gpu
def test_a_gpu_that_waits_is_not_busy():
    a = torch.randn(4096, 4096, device="cuda")

    def work(seed):
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()

    def lazy(seed):
        begun = time.perf_counter()
        work(seed)
        time.sleep(time.perf_counter() - begun)

    shape = {"batch": 1, "length": 1, "steps": 1}
    cases = [Case(name="busy", run=work, **shape), Case(name="lazy", run=lazy, **shape)]
    found = time_cases(cases, 3, torch.device("cuda"), busy=True)
    shares = [row["gpu_busy"] for row in make_rows(cases, found)]
    assert 0 < shares[1] < 0.8 * shares[0]  # a half, where others leave the GPU alone
