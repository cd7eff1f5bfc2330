"""What is compiled on a GPU runs as it is written elsewhere, and where torch fails."""

import pytest
import torch

from didi_instruct.models import compile as fused
from didi_instruct.models import compile as remarks
from didi_instruct.models.compile import Fused, fuses, fusing


def double(x):
    return 2 * x


@pytest.mark.parametrize("allowed", [True, False])
def test_on_a_cpu_nothing_is_compiled(allowed, monkeypatch):
    monkeypatch.setattr(fused, "compiled", lambda *a: pytest.fail("compiled"))
    with fusing(allowed):
        assert not fuses(torch.ones(3))
        assert torch.equal(Fused(double, "It")(torch.ones(3)), torch.full((3,), 2.0))


def test_another_function_stands_in_where_nothing_is_compiled():
    assert Fused(double, "It", lambda x: 3 * x)(torch.ones(3)).tolist() == [3.0] * 3


@pytest.fixture
def everywhere(monkeypatch):
    """As on a GPU, with a compiler that counts and does nothing else."""
    asked = []
    monkeypatch.setattr(fused, "fuses", lambda tensor: True)
    monkeypatch.setattr(fused, "compiled", lambda function: asked.append(function) or function)
    return asked


def test_rows_of_any_number_are_compiled_once(everywhere):
    function = Fused(double, "It", lambda x: 3 * x)
    for rows in (5, 2, 9):
        assert function(torch.ones(rows)).tolist() == [2.0] * rows
    assert everywhere == [double]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_row_or_none_would_be_compiled_anew(everywhere, rows):
    assert Fused(double, "It", lambda x: 3 * x)(torch.ones(rows)).tolist() == [3.0] * rows
    assert not everywhere


def test_a_refusal_is_told_once_and_does_not_stop_anything(everywhere, monkeypatch):
    def fails(x):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(fused, "compiled", lambda function: everywhere.append(function) or fails)
    said = []
    monkeypatch.setattr(fused, "warn_once", said.append)
    function = Fused(double, "Doubling")
    for _ in range(3):
        assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert said == ["Doubling cannot be compiled here, so it runs slower: no compiler"]
    assert everywhere == [double]
    assert said[0] not in remarks.remarks


def test_memory_that_is_not_there_is_no_refusal(everywhere, monkeypatch):
    def fails(x):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(fused, "compiled", lambda function: fails)
    with pytest.raises(torch.OutOfMemoryError):
        Fused(double, "It")(torch.ones(2))


def test_within_a_function_that_is_compiled_it_is_a_part_of_it(everywhere, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Fused(double, "It", lambda x: 3 * x)(torch.ones(3)).tolist() == [2.0] * 3
    assert not everywhere


def test_what_is_allowed_ends_with_its_block():
    with fusing(True):
        with fusing(False):
            assert not fused._allowed.get()
        assert fused._allowed.get()
    assert not fused._allowed.get()
