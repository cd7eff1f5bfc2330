"""The frozen numbers of docs/results.md still make its table and its picture."""

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments" / "rivals.py"


def test_frozen_numbers_make_the_table_and_the_picture(tmp_path, monkeypatch, capsys):
    """Two cells of the table are those of the page."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path / "rivals.png")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    table = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.split("\n")
    ]
    rows = {(line[1], line[2]): line for line in table if len(line) > 2}
    assert rows["MDLM, streams order", "8"][4:6] == ["26.278", "4.269"]
    assert rows["SDTT", "4"][8:10] == ["579.5", "572.4"]
    assert (tmp_path / "rivals.png").stat().st_size > 50_000
