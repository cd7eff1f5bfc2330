import math
import re

import pytest

from didi_instruct.evaluation.report import Content, render_terminal
from didi_instruct.evaluation.table import (
    COLUMNS,
    INEXACT_PATH_KL,
    Z95,
    interval,
    interval_text,
    meaning,
    number,
    shown_columns,
)

PATH_KL = next(column for column in COLUMNS if column.field == "path_kl")


def row(model="a", steps=8, **numbers):
    settings = {"nfe": steps, "passes": steps - 0.5, "temperature": 1.0, "top_p": 1.0}
    return {"model": model, "steps": steps, **settings, **numbers}


def titles(rows):
    return [column.title for column in shown_columns(rows)]


def test_a_column_is_there_where_it_tells_something():
    assert titles([row(ppl=3.0, path_kl=None), row(entropy=4.0)]) == [
        "steps", "passes", "ppl", "entropy",
    ]  # fmt: skip
    assert titles([row(), row(temperature=0.9)]) == ["steps", "passes", "T"]
    assert titles([row(), row(top_p=0.9)]) == ["steps", "passes", "top-p"]
    assert titles([row(nfe=64)]) == ["steps", "NFE", "passes"]
    assert titles([]) == []


def test_the_terminal_shows_every_number_under_its_title():
    rows = [row("teacher", 8, ppl=428.123, gap_closed=0.456), row("runs/student", 16, ppl=7.0)]
    real = row("valid", 8, ppl=27.3, entropy=4.79)
    content = Content(title="", rows=rows, reference=real)
    head, *lines = render_terminal(content, 120)
    assert len({len(line) for line in (head, *lines)}) == 1
    cells = [re.split(r"\s{2,}", line) for line in (head, *lines)]
    assert cells == [
        ["model", "steps", "passes", "ppl", "entropy", "gap closed"],
        ["teacher", "8", "7.5", "428.12", "–", "45.6%"],
        ["student", "16", "15.5", "7.00", "–", "–"],
        ["valid", "–", "27.30", "4.790", "–"],
    ]


def test_every_title_fits_its_column():
    assert all(len(column.title) < 12 for column in COLUMNS)
    assert len({column.field for column in COLUMNS}) == len(COLUMNS)


def test_an_interval_is_the_measured_one_or_that_of_a_normal_error():
    assert math.erf(Z95 / math.sqrt(2)) == pytest.approx(0.95, abs=1e-6)
    assert interval({"ppl": 3.0, "ppl_ci95": [2.0, 5.0], "ppl_se": 9.0}, "ppl") == (2.0, 5.0)
    low, high = interval({"ar_kl": 3.0, "ar_kl_se": 0.5}, "ar_kl")
    assert (low + high) / 2 == pytest.approx(3)
    assert (high - low) / 2 == pytest.approx(0.98, abs=1e-3)
    for unknown in (
        {}, {"ppl": 3.0}, {"ppl": None, "ppl_ci95": [1, 2]}, {"ppl": 3.0, "ppl_ci95": None},
        {"ppl": 3.0, "ppl_ci95": [1.0, math.inf]},
    ):  # fmt: skip
        assert interval(unknown, "ppl") is None


def test_cells_have_the_digits_of_their_column():
    values = {"path_kl": -1.23456, "path_kl_ci95": [-2.0, 0.00049]}
    assert (number(values, PATH_KL), interval_text(values, PATH_KL)) == (
        "-1.235",
        "[-2.000, 0.000]",
    )
    assert (number({}, PATH_KL), interval_text({}, PATH_KL)) == ("–", "")


def test_path_kl_of_an_inexact_judge_is_explained_as_such():
    assert "upper bound" in meaning(PATH_KL, [{"path_kl_exact": True}, {}])
    assert meaning(PATH_KL, [{}, {"path_kl_exact": False}]) == INEXACT_PATH_KL
    assert "may be negative" in INEXACT_PATH_KL
    for exact in (True, False):
        words = meaning(PATH_KL, [{"path_kl_exact": exact}])
        assert "can reward texts that are a little too much alike" in words
        assert all(name in words for name in ("entropy", "4-grams", "Self-BLEU"))
