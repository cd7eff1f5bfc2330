"""From items to files: what cannot be drawn or made is told, and stops nothing else."""

import json
import sys
import types
from dataclasses import replace

import pytest

from didi_instruct.errors import UserError
from didi_instruct.reproduce import experiments
from didi_instruct.reproduce.experiments import judged_by_others, make, origin, write_only
from didi_instruct.reproduce.grid import Standing
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.lines import Experiment, Line
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.tables import Shown, Table

JOB = Job(name="job", does="making_calls:value")


def draw(scale, table, path):
    path.write_bytes(b"drawn")


def refuse(scale, table, path):
    raise UserError("nothing to draw")


def item(figure=draw, name="thing"):
    def table(scale, answers):
        rows = [
            {"method": "a", "nfe": 4, "x": answers.results[JOB.key], "seed": 0, "num_samples": 1}
        ]
        return Table(rows=rows, shown=(Shown("x", "x"),))

    return Experiment(
        name=name,
        title="A thing",
        where="",
        lines=lambda scale: [Line(JOB)],
        table=table,
        draw=figure,
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
    text = (tmp_path / "tables" / "thing.md").read_text()
    assert text.startswith("# A thing\n")
    assert "| a | 3.50 |" in text


def test_a_table_may_have_a_title_of_its_own(toy, tmp_path):
    """Where what the item is called is not what a table of this scale holds."""

    def smaller(scale, answers):
        return replace(item().table(scale, answers), title="A smaller thing")

    make([replace(item(), table=smaller)], toy[1], tmp_path)
    text = (tmp_path / "tables" / "thing.md").read_text()
    assert text.startswith("# A smaller thing\n")


def test_a_figure_that_cannot_be_drawn_is_told_and_not_named(toy, tmp_path):
    make([item()], toy[1], tmp_path)
    outcome = make([item(figure=refuse)], toy[1], tmp_path)
    text = (tmp_path / "tables" / "thing.md").read_text()
    assert "the figure: nothing to draw" in text
    assert ".png" not in text
    assert [path.suffix for path in outcome.made[0].files] == [".md", ".csv", ".json"]
    assert not (tmp_path / "tables" / "thing.png").exists()


def test_without_matplotlib_the_table_says_what_is_missing(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "can_draw", lambda: False)
    make([item()], toy[1], tmp_path)
    assert "matplotlib is missing" in (tmp_path / "tables" / "thing.md").read_text()


def test_a_run_without_results_leaves_the_older_table_as_it_is(toy, tmp_path):
    """Whether an item's table fails for the want of a result, or would come out empty."""
    module, scale = toy
    make([item()], scale, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    module.value = refuse_to_run
    (done,) = (tmp_path / "jobs").glob("*/done.json")
    done.unlink()
    empty = replace(item(), table=lambda scale, answers: Table(rows=[], shown=()))
    for thing in (item(), empty):
        made = make([thing], scale, tmp_path).made[0]
        assert made.table is None
        assert not made.files
        assert "no luck" in made.error
        assert "earlier run stays" in made.error
    assert {p.name: p.read_bytes() for p in (tmp_path / "tables").iterdir()} == before


def test_a_table_of_what_has_finished_runs_nothing(toy, tmp_path):
    module, scale = toy
    outcome = write_only([item()], scale, tmp_path)
    assert not outcome.whole
    assert outcome.made[0].error.startswith("no table: job: not run yet")
    assert [one.note for one in outcome.failures] == ["not run yet"]
    assert not list(tmp_path.iterdir())

    make([item()], scale, tmp_path)
    text = (tmp_path / "tables" / "thing.md").read_text()
    module.value = refuse_to_run
    assert write_only([item()], scale, tmp_path).whole
    assert (tmp_path / "tables" / "thing.md").read_text().splitlines()[:6] == text.splitlines()[:6]


def test_a_table_of_results_alone_names_the_trainings_behind_them(toy, tmp_path):
    """Settings and all, whose models are somewhere else."""
    training = Job(
        name="model", does="pretrain", recipe="oracle-teacher", overrides=("train.steps=7",)
    )
    drawn = replace(JOB, inputs={"model": training})
    folder = tmp_path / "jobs" / f"job-{drawn.key}"
    folder.mkdir(parents=True)
    told = {"key": drawn.key, "seconds": 2.0, "result": 3.5}
    (folder / "done.json").write_text(json.dumps(told))
    row = {"method": "a", "nfe": 4, "x": 3.5, "seed": 0, "num_samples": 1}
    thing = replace(
        item(),
        lines=lambda scale: [Line(drawn)],
        table=lambda scale, answers: Table(rows=[row], shown=(Shown("x", "x"),)),
    )
    assert write_only([thing], toy[1], tmp_path).whole
    text = (tmp_path / "tables" / "thing.md").read_text()
    assert f"- job job: {drawn.key}, 2 s" in text
    assert f"- job model: {training.key}, trained elsewhere by oracle-teacher" in text
    jobs = json.loads((tmp_path / "tables" / "thing.json").read_text())["jobs"]
    assert [(job["name"], job["state"]) for job in jobs] == [
        ("job", "kept"),
        ("model", "elsewhere"),
    ]
    assert jobs[1]["overrides"] == ["train.steps=7"]


def test_a_table_tells_where_its_jobs_were_made(toy, tmp_path):
    """A kept result is of the code and the machine that made it, not of those that write."""
    _, scale = toy
    make([item()], scale, tmp_path)
    (path,) = (tmp_path / "jobs").glob("*/done.json")
    told = json.loads(path.read_text())
    assert told["provenance"]["device"] in ("cpu", "cuda")
    told["provenance"] |= {"commit": "abc", "torch": "0.1", "date": "2001-02-03 04:05 UTC"}
    path.write_text(json.dumps(told))
    make([item()], scale, tmp_path)
    found = json.loads((tmp_path / "tables" / "thing.json").read_text())["provenance"]
    assert (found["commit"], found["torch"]) == ("abc", "0.1")
    assert found["jobs finished"] == "2001-02-03 04:05 UTC"
    assert not found["written"].startswith("2001")
    assert found["note"].startswith("1 of 1 jobs")


def test_all_origins_of_a_table_are_named():
    jobs = [
        Standing(JOB, provenance={"date": "2026-01-02", "commit": "a", "GPU": "one"}),
        Standing(JOB, provenance={"date": "2026-01-01", "commit": "b", "GPU": "one"}),
        Standing(JOB),
    ]
    found = dict(origin(jobs, {"date": "2026-01-03", "commit": "b"}))
    assert found == {
        "jobs finished": "2026-01-01 to 2026-01-02",
        "commit": "a; b",
        "GPU": "one",
        "written": "2026-01-03, commit b",
        "note": "1 of 2 jobs are of another commit than the code that writes",
    }
    assert "note" not in dict(origin(jobs[1:], {"date": "2026-01-03", "commit": "b"}))


def test_a_judge_is_not_asked_of_its_own_samples(toy):
    """Its numbers go, others' stay, whether it has a job of its own or stands among others."""
    judge = Job(name="ar", does="pretrain", recipe="oracle-teacher")
    scale = replace(toy[1], judge=judge)
    alone = Job(name="alone", does="m:f", inputs={"model": judge, "judge": judge})
    among = Job(name="among", does="m:f", inputs={"ar": judge, "teacher": "oracle", "judge": judge})
    row = {"ppl": 2.0, "ppl_ci95": [1, 3], "path_kl": 1.0, "vsf": 0.9, "entropy": 3.0}
    rows = [row | {"role": "ar"}, row | {"role": "teacher"}]
    results = {alone.key: [row], among.key: rows}
    found, note = judged_by_others(results, [alone, among], scale)
    bare = {"ppl": None, "ppl_ci95": None, "path_kl": None, "vsf": None, "entropy": 3.0}
    assert found == {alone.key: [bare], among.key: [bare | {"role": "ar"}, rows[1]]}
    assert "itself the judge" in note
    assert judged_by_others(results, [alone, among], toy[1]) == (results, "")


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
