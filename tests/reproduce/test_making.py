"""From items to files: what cannot be drawn or made is told, and stops nothing else."""

import sys
import types

import pytest

from didi_instruct.errors import UserError
from didi_instruct.reproduce import making
from didi_instruct.reproduce.items import Item
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.making import make
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.tables import Shown, Table

JOB = Job(name="job", does="making_calls:value")


def draw(scale, table, results, path):
    path.write_bytes(b"drawn")


def refuse(scale, table, results, path):
    raise UserError("nothing to draw")


def item(figure=draw, name="thing"):
    def table(scale, results):
        rows = [{"method": "a", "nfe": 4, "x": results[JOB.key], "seed": 0, "num_samples": 1}]
        return Table(title="A thing", rows=rows, shown=(Shown("x", "x"),))

    return Item(
        name=name, title="A thing", where="", jobs=lambda scale: [JOB], table=table, figure=figure
    )


@pytest.fixture
def toy(monkeypatch):
    module = types.ModuleType("making_calls")
    module.value = lambda context: 3.5
    monkeypatch.setitem(sys.modules, "making_calls", module)
    return module, find_scale("toy", Given())


def test_an_item_has_its_table_and_its_figure(toy, tmp_path):
    outcome = make([item()], toy[1], tmp_path)
    assert outcome.whole
    names = [path.name for path in outcome.made[0].files]
    assert names == ["thing.md", "thing.csv", "thing.json", "thing.png"]
    assert "| a | 3.50 |" in (tmp_path / "tables" / "thing.md").read_text()


def test_a_figure_that_cannot_be_drawn_is_told_and_not_named(toy, tmp_path):
    make([item()], toy[1], tmp_path)
    outcome = make([item(figure=refuse)], toy[1], tmp_path)
    text = (tmp_path / "tables" / "thing.md").read_text()
    assert "the figure: nothing to draw" in text
    assert ".png" not in text
    assert [path.suffix for path in outcome.made[0].files] == [".md", ".csv", ".json"]
    assert not (tmp_path / "tables" / "thing.png").exists()


def test_without_matplotlib_the_table_says_what_is_missing(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "can_draw", lambda: False)
    make([item()], toy[1], tmp_path)
    assert "matplotlib is missing" in (tmp_path / "tables" / "thing.md").read_text()


def test_an_item_that_cannot_do_without_a_failed_job_is_told(toy, tmp_path):
    module, scale = toy
    module.value = refuse_to_run
    outcome = make([item(), item(name="other")], scale, tmp_path)
    assert not outcome.whole
    assert [made.table for made in outcome.made] == [None, None]
    assert "ValueError: no luck" in outcome.made[0].error


def refuse_to_run(context):
    raise ValueError("no luck")


def test_a_table_names_no_folder_of_this_machine(toy, tmp_path):
    make([item()], toy[1], tmp_path)
    for path in (tmp_path / "tables").glob("thing.*"):
        assert str(tmp_path) not in path.read_text(errors="replace")
