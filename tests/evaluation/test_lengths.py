"""Means over lengths."""

import math
from dataclasses import replace

import pytest

from didi_instruct.errors import UserError
from didi_instruct.evaluation.evaluate import EvalConfig, Evaluation, evaluate
from didi_instruct.evaluation.lengths import joined, mean_row
from didi_instruct.evaluation.report.summary import Summary


def row(length, steps=8, model="m", **numbers):
    settings = {"sampler": "ancestral", "options": {}, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    counts = {"steps": steps, "nfe": steps, "num_samples": 40, "length": length}
    return {"model": model, **settings, **counts, **numbers}


def test_a_mean_weighs_lengths_equally_and_has_its_own_interval():
    rows = [
        row(100, cluster_entropy=3.0, cluster_entropy_ci95=[2.7, 3.1], note=None),
        row(200, cluster_entropy=2.0, cluster_entropy_ci95=[1.6, 2.2], note="x"),
    ]
    found = mean_row(rows)
    assert found["cluster_entropy"] == 2.5
    low, high = found["cluster_entropy_ci95"]
    assert low == pytest.approx(2.5 - math.hypot(0.3, 0.4) / 2)
    assert high == pytest.approx(2.5 + math.hypot(0.1, 0.2) / 2)
    assert (found["length"], found["lengths"], found["steps"]) == (None, [100, 200], 8)
    assert (found["num_samples"], found["note"]) == (40, None)


def test_what_one_length_lacks_has_no_mean():
    found = mean_row(
        [
            row(100, ppl=3.0, ppl_ci95=None, ppl_note="why"),
            row(200, ppl=None, ppl_ci95=None, ppl_note="why"),
        ]
    )
    assert (found["ppl"], found["ppl_ci95"], found["ppl_note"]) == (None, None, "why")


def quality(length, value):
    real = row(length, model="real", entropy=2.9) | {"steps": None, "nfe": None}
    rows = [row(length, steps, entropy=value + steps / 100) for steps in (8, 16)]
    return Evaluation(rows=rows, baseline=[], judge=None, reference=real, controls=(real,))


def test_tables_join_row_by_row_and_are_shown_by_length():
    found = joined([quality(512, 2.0), quality(512, 3.0)], [100, 200])
    assert [(r["steps"], r["length"]) for r in found.rows] == [
        (8, 100), (8, 200), (8, None), (16, 100), (16, 200), (16, None),
    ]  # fmt: skip
    assert found.rows[2]["entropy"] == pytest.approx(2.58)
    assert [r["length"] for r in found.controls] == [100, 200, None]
    s = Summary(replace(found, reference={}), "")
    entries = [entry for group in (*s.table, *s.not_sampled) for entry in group.entries]
    assert [(entry.name, bool(entry.doubt)) for entry in entries] == [
        ("m · length 100", True), ("m · length 200", False), ("m · mean over lengths", False),
        ("m · length 100", True), ("m · length 200", False), ("m · mean over lengths", False),
        ("real, length 100", False), ("real, length 200", False),
    ]  # fmt: skip


def test_saved_samples_have_their_own_length(tmp_path):
    with pytest.raises(UserError, match="leave out --lengths"):
        evaluate([], EvalConfig(lengths=(8, 16)), out=tmp_path, samples=[tmp_path / "a"])
