"""What runs in a process of its own takes its turns, and cannot hurt who waits for it."""

import faulthandler
import gc
import operator
import os
import time
from functools import partial

import pytest
import torch

from didi_instruct.benchmarking import apart as apart_module
from didi_instruct.benchmarking.apart import Apart
from didi_instruct.benchmarking.report import Bench, make_rows, notes
from didi_instruct.benchmarking.timing import Case, time_cases


def case(name, run):
    return Case(name=name, run=run, batch=1, length=1, steps=1)


def test_a_run_is_waited_for_and_its_process_ends_with_it():
    apart = Apart(partial, time.sleep)
    apart(0)
    began = time.perf_counter()
    apart(1)
    assert 1 <= time.perf_counter() - began < 2
    process = apart._process
    assert process.is_alive()
    del apart
    gc.collect()
    assert process.exitcode == 0


def test_what_is_raised_there_is_raised_here_and_it_goes_on():
    apart = Apart(partial, operator.truediv, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="division by zero"):
            apart(0)
    apart(1)


@pytest.mark.parametrize(("crash", "code"), [(faulthandler._sigsegv, -11), (os._exit, 1)])
def test_a_crash_costs_one_row(crash, code):
    """A segmentation fault, and an exit without a word; the row beside it is timed."""
    cases = [case("ours", lambda seed: None), case("theirs", Apart(partial, crash))]
    found = time_cases(cases, 2, torch.device("cpu"))
    assert len(found[0].seconds) == 2
    rows = make_rows(cases, found)
    assert rows[1]["seconds_median"] is None
    assert notes(Bench("m", rows)) == [f"theirs did not run: its process ended with code {code}"]


def test_a_run_without_an_end_costs_one_row(monkeypatch):
    monkeypatch.setattr(apart_module, "LIMIT", 0.5)
    apart = Apart(partial, time.sleep)
    with pytest.raises(RuntimeError, match="no answer within 0.5 s"):
        apart(60)
    apart._process.join(10)
    assert not apart._process.is_alive()
