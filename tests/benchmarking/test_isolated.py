"""What runs in a process of its own takes its turns, and cannot hurt the process that waits."""

import faulthandler
import gc
import operator
import os
import time
from functools import partial

import pytest
import torch

from didi_instruct.benchmarking.isolated import Isolated
from didi_instruct.benchmarking.timing import Case, time_cases


def case(name, run):
    return Case(name=name, run=run, batch=1, length=1, steps=1)


def test_a_run_is_waited_for_and_its_process_ends_with_it():
    isolated = Isolated(partial, time.sleep)
    isolated(0)
    began = time.perf_counter()
    isolated(1)
    assert 1 <= time.perf_counter() - began < 2
    process = isolated.process
    assert process.is_alive()
    del isolated
    gc.collect()
    assert process.exitcode == 0


def test_what_is_raised_there_is_raised_here_and_it_goes_on():
    isolated = Isolated(partial, operator.truediv, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="division by zero"):
            isolated(0)
    isolated(1)


@pytest.mark.parametrize(("crash", "code"), [(faulthandler._sigsegv, -11), (os._exit, 1)])
def test_a_crash_costs_one_row(crash, code):
    """A segmentation fault, and an exit without a word; the row beside it is timed."""
    cases = [case("ours", lambda seed: None), case("theirs", Isolated(partial, crash))]
    found = time_cases(cases, 2, torch.device("cpu"))
    assert len(found[0].seconds) == 2
    assert found[1].median is None
    assert found[1].failure == f"its process ended with code {code}"


def test_a_run_without_an_end_costs_one_row():
    isolated = Isolated(partial, time.sleep, time_limit=0.5)
    with pytest.raises(RuntimeError, match="no answer within 0.5 s"):
        isolated(60)
    isolated.process.join(10)
    assert not isolated.process.is_alive()
