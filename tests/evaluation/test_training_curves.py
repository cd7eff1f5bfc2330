import json
import struct
import sys

import numpy as np
import pytest

from didi_instruct.errors import UserError
from didi_instruct.evaluation.training_curves import (
    COLOURS,
    GROUPS,
    draw_curves,
    panels_of,
    read_log,
    running_mean,
)


def write_log(path, *records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def labels(panel):
    return [series.label for series in panel.series]


def test_a_panel_is_there_where_one_of_its_numbers_is():
    panels = panels_of(
        [
            {"step": 1, "loss": 2.0, "aux_loss": 1.0, "lr": 1e-4, "mfu": 0.4, "novelty": 1.0},
            {"step": 2, "loss": 1.5, "aux_loss": 0.9, "lr": 1e-4, "tokens_per_second": 1e5},
            {"step": 2, "reward_student": -0.5},
        ]
    )
    assert {panel.group.title: labels(panel) for panel in panels} == {
        "reward": ["reward_student"],
        "loss": ["loss", "aux_loss"],
        "learning rate": ["lr"],
        "speed": ["tokens_per_second"],
    }
    assert panels_of([{"step": 1, "mfu": 0.4}]) == []


def test_training_and_evaluation_lines_have_their_own_steps():
    records = [
        {"step": 20, "loss": 2.0},
        {"step": 10, "loss": 3.0},
        {"step": 10, "unique_4gram": 0.9},
        {"step": 10, "loss": 4.0},
    ]
    loss, unique = panels_of(records)
    assert list(loss.series[0].points.items()) == [(10, 4.0), (20, 2.0)]
    assert unique.series[0].points == {10: 0.9}


def test_path_kls_come_first_with_a_colour_per_budget_and_their_errors():
    """A sampler without path KL has its judge and entropy first."""
    record = {"path_kl_16": 6.0, "path_kl_4": 9.0, "path_kl_4_raw": 9.5, "path_kl_4_se": 0.1}
    other = {"path_kl_best": 1.0, "path_kl_4_raw_old": 1.0, "path_kl_se": 1.0, "loss": 1.0}
    records = [{"step": 5, **record, **other}, {"step": 10, "path_kl_4": 8.0}]
    panel, loss = panels_of(records)
    assert (panel.group.title, loss.group.title) == ("path KL, nats per sequence", "loss")
    four, raw, sixteen = panel.series
    assert [(s.label, s.raw) for s in panel.series] == [
        ("4 steps", False),
        ("4 steps", True),
        ("16 steps", False),
    ]
    assert four.colour == raw.colour != sixteen.colour
    assert [s.style for s in panel.series] == ["-", "--", "-"]
    assert four.errors == [0.1, 0.0]
    assert raw.errors is None
    records = [{"step": 0, "loss": 1.0, "judge_nats_4": 2.0, "entropy_4": 3.0, "entropy": 0.5}]
    assert [p.group.title for p in panels_of(records)] == [
        "judge, nats per token",
        "entropy of a sample's tokens, nats",
        "loss",
        "entropy, nats per token",
    ]


def test_a_right_axis_is_there_only_beside_a_left_one():
    (both,) = panels_of([{"step": 1, "disc_loss": 0.6, "disc_accuracy": 0.7}])
    assert labels(both) == ["disc_loss", "disc_accuracy (right)"]
    assert [(s.right, s.style) for s in both.series] == [(False, "-"), (True, "--")]
    (alone,) = panels_of([{"step": 1, "disc_accuracy": 0.7, "disc_sharpness": 0.6}])
    assert labels(alone) == ["disc_accuracy", "disc_sharpness"]
    assert [(s.right, s.style) for s in alone.series] == [(False, "-")] * 2


def test_a_logarithm_is_taken_of_positive_numbers_alone():
    """A frozen network has no gradient; its zeros are no points."""
    records = [{"step": n, "grad_norm": float(n > 2), "aux_grad_norm": 0.0} for n in range(1, 5)]
    (panel,) = panels_of(records)
    assert panel.group.log
    assert labels(panel) == ["grad_norm"]
    assert list(panel.series[0].points) == [3, 4]


def test_every_number_of_a_group_has_a_colour():
    assert all(len(group.left + group.right) <= len(COLOURS) for group in GROUPS)


def test_a_running_mean_is_the_mean_of_what_the_window_holds():
    values = np.array([1.0, 5.0, 3.0, 7.0, 9.0])
    expected = [values[max(0, i - 1) : i + 2].mean() for i in range(5)]
    np.testing.assert_allclose(running_mean(values, 3), expected)
    np.testing.assert_allclose(running_mean(values, 1), values)


def test_cut_and_foreign_lines_are_skipped(tmp_path):
    tail = '17\n{"loss": 1.0}\n{"step": 2, "loss": NaN, "note": "x", "ok": true}\n{"step": 3, "lo'
    log = write_log(tmp_path / "log.jsonl", {"step": 1, "loss": 2.0}, tail=tail)
    assert read_log(log) == [{"step": 1, "loss": 2.0}, {"step": 2}]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "does not exist"),
        ("", "holds no steps"),
        ('{"step": 3, "lo', "holds no steps"),
        ('{"step": 3, "mfu": 0.5}\n', "none of the numbers"),
    ],
)
def test_a_log_without_numbers_is_refused(tmp_path, text, match):
    log = tmp_path / "log.jsonl"
    if text is not None:
        log.write_text(text)
    with pytest.raises(UserError, match=match):
        draw_curves(log, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.filterwarnings("error")
def test_the_picture_is_1200_pixels_wide_and_grows_with_its_panels(tmp_path):
    pytest.importorskip("matplotlib")
    names = [name for group in GROUPS for name in group.left + group.right]
    numbers = [dict.fromkeys(names, 0.1 + n) | {"clip_fraction": 0.0} for n in range(50)]
    evaluations = {"path_kl_4": 3.0, "path_kl_4_raw": 3.1, "path_kl_4_se": 0.2}
    full = [{"step": n, **values} for n, values in enumerate(numbers)]
    small = write_log(tmp_path / "small.jsonl", {"step": 1, "loss": 1.0})
    large = write_log(tmp_path / "large.jsonl", *full, {"step": 50, **evaluations})
    sizes = []
    for log in (small, large):
        out = log.with_suffix(".png")
        assert draw_curves(log, out, title="a run of $5 and _more_ $")
        sizes.append(png_size(out))
        assert out.stat().st_size > 5000
    assert [width for width, _ in sizes] == [1200, 1200]
    assert sizes[0][1] < 400 < 1500 < sizes[1][1]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".jsonl", ".jsonl", ".png", ".png"]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = write_log(tmp_path / "log.jsonl", {"step": 1, "loss": 2.0})
    assert draw_curves(log, tmp_path / "curves.png") is False
    assert not (tmp_path / "curves.png").exists()
