"""`didi reproduce` from end to end, with an item made tiny."""

import json
from dataclasses import replace

import pytest
import torch

from didi_instruct.cli.reproduce import _time as told_time
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.model import load
from didi_instruct.reproduce import experiments, minutes, scales
from didi_instruct.reproduce.experiments import ITEMS
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.running import RUN, folder_of
from didi_instruct.reproduce.scale import Given
from didi_instruct.reproduce.scales import find_scale

TEACHER = Job(
    name="teacher", does="pretrain", recipe="oracle-teacher",
    overrides=(
        "model.hidden=16", "model.heads=2", "model.layers=2", "train.batch_size=8",
        "train.steps=8", "train.eval_sequences=4", "optim.warmup=2",
    ),
)  # fmt: skip
SMALLER = ("train.steps=4", "discriminator.warmup=1", "reference.rows=16", "reference.steps=2")


@pytest.fixture
def tiny(monkeypatch):
    """A toy scale of seconds; returned to change it."""
    toy = find_scale("toy", Given())
    changed = replace(
        toy, teacher=TEACHER, ablation=(*toy.ablation, *SMALLER), samples=8, budgets=(2,),
        most_steps=4,
    )  # fmt: skip
    held = {"scale": changed}
    monkeypatch.setattr(scales, "find_scale", lambda name, given: held["scale"])
    return held


def test_an_item_is_made_once_and_its_numbers_are_true(didi, tiny, tmp_path):
    """The teacher's perplexity is that of its own samples under the language, drawn again here."""
    code, out, err = didi("reproduce", "generation", "--out", tmp_path)
    assert code == 0, err
    assert "Generation results" in out
    table = json.loads((tmp_path / "tables" / "generation.json").read_text())
    found = next(r for r in table["rows"] if r["role"] == "teacher" and r["nfe"] == 2)
    model = load(folder_of(TEACHER, tmp_path) / RUN)
    tokens = model.sample(num=8, steps=2, seed=0)
    nats = -OracleLanguage.default().log_prob(tokens) / tokens.shape[1]
    assert found["ppl"] == pytest.approx(torch.exp(nats.mean()).item(), rel=1e-5)
    assert (found["seed"], found["num_samples"], table["scale"]) == (0, 8, "toy")
    for row in table["rows"]:
        assert row["entropy"] is not None

    code, _, err = didi("reproduce", "generation", "--out", tmp_path)
    assert code == 0
    assert "running" not in err


def test_tables_of_what_has_finished(didi, tiny, tmp_path, monkeypatch):
    """Without a GPU at any scale; with minutes by paces that are kept."""
    code, _, err = didi("reproduce", "generation", "--out", tmp_path, "--write-only")
    assert code == 1
    assert "generation: no table: teacher: not run yet" in err
    assert didi("reproduce", "generation", "--out", tmp_path)[0] == 0
    (tmp_path / "tables" / "generation.md").unlink()
    monkeypatch.setattr(experiments.Grid, "run", None)
    tiny["scale"] = replace(tiny["scale"], name="paper")
    assert didi("reproduce", "generation", "--out", tmp_path, "--write-only")[0] == 0
    assert (tmp_path / "tables" / "generation.md").exists()
    seen = []
    monkeypatch.setattr(minutes, "expected", lambda scale, *given: seen.append(given) or scale)
    code, _, err = didi("reproduce", "latency", "--out", tmp_path, "--write-only", "--minutes", 1)
    assert code == 1
    assert "latency: no table" in err
    assert seen == [(1.0, tmp_path)]


def test_a_failed_job_leaves_the_rest_and_exit_code_1(didi, tiny, tmp_path):
    scale = tiny["scale"]
    too_many = "discriminator.trainable_blocks=9"
    tiny["scale"] = replace(scale, ablation=(*scale.ablation, too_many))
    code, _, err = didi("reproduce", "generation", "--out", tmp_path)
    assert code == 1
    assert "failed: ablation-all-tricks-seed0" in err
    text = (tmp_path / "tables" / "generation.md").read_text()
    assert "**Missing:**" in text
    table = json.loads((tmp_path / "tables" / "generation.json").read_text())
    assert {row["role"] for row in table["rows"]} == {"teacher"}


def test_several_items_share_their_jobs(didi, tiny, tmp_path):
    def listed(items):
        _, out, _ = didi("reproduce", items, "--out", tmp_path / "new", "--dry-run")
        return {line.split()[0] for line in out.splitlines() if " to do " in line}

    alone = [listed(item) for item in ("generation", "latency")]
    assert "teacher" in alone[0] & alone[1]
    assert alone[0] != alone[1]
    assert listed("generation, latency,generation") == alone[0] | alone[1]
    code, _, err = didi("reproduce", "latency,latenzy", "--out", tmp_path / "new", "--dry-run")
    assert code == 2
    assert "latenzy" in err


def test_a_dry_run_lists_checks_and_does_nothing(didi, tiny, tmp_path):
    code, out, _ = didi("reproduce", "generation", "--out", tmp_path / "new", "--dry-run")
    assert code == 0
    assert "5 jobs, 5 to do" in out
    assert "30% of its peak" in out
    assert not (tmp_path / "new").exists()


def test_all_leaves_out_what_a_scale_sets_apart_and_says_so(didi, tiny, tmp_path):
    others = tuple(name for name in ITEMS if name != "generation")
    tiny["scale"] = replace(tiny["scale"], apart=others)
    code, out, err = didi("reproduce", "all", "--out", tmp_path / "new", "--dry-run")
    assert code == 0
    assert "5 jobs, 5 to do" in out
    assert "name it to have it: figure-1, " in err


def test_the_list_names_all_items(didi):
    code, out, _ = didi("reproduce", "--list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(lines) == set(ITEMS)
    assert lines["protein-diversity"].endswith("table)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Name an item"),
        (("figur-1",), "Did you mean `figure-1`?"),
        (("proteins",), "Did you mean `protein-plddt`?"),
        (("figure-1", "--scale", "huge"), "choose one of toy, small, paper"),
        (("figure-1", "--scale", "small"), "--scale small needs text"),
        (("figure-1", "--rivals", "sdtt"), "--rivals is for baselines"),
        (("baselines", "--rivals", "sdtt,dom"), "--rivals dom: at scale toy there are ar, duo"),
    ],
)
def test_mistakes_are_told_in_one_line(didi, arguments, words):
    code, _, err = didi("reproduce", *arguments)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_ctrl_c_while_measuring_keeps_what_is_done(didi, tiny, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("didi_instruct.reproduce.measure.quality", interrupt)
    code, _, err = didi("reproduce", "generation", "--out", tmp_path)
    assert code == 130
    assert "The same command goes on." in err
    assert "--resume" not in err


def test_a_folder_inside_of_a_file_is_refused(didi, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        code, _, err = didi("reproduce", "figure-1", "--out", out)
        assert code == 2
        assert "is a file" in err


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        (0.0, "nothing"),
        (1e-5, "under a minute"),
        (0.5, "30 GPU-minutes"),
        (1234, "1,234 GPU-hours"),
    ],
)
def test_estimates_are_told_in_units_people_plan_with(hours, words):
    assert told_time(hours) == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_paper_scale_does_not_begin_without_a_gpu(didi, tmp_path):
    code, _, err = didi("reproduce", "all", "--scale", "paper", "--out", tmp_path)
    assert code == 2
    assert "needs a GPU" in err
    assert not list(tmp_path.iterdir())


def test_what_cannot_share_a_gpu_is_refused(didi, tmp_path):
    arguments = ["figure-1", "--device", "cpu", "--at-once", 2]
    code, _, err = didi("reproduce", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert "share GPUs" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("samples", "--minutes", 1), ("baselines", "--minutes", 0)])
def test_minutes_are_for_students_on_equal_terms(didi, tmp_path, arguments):
    code, _, err = didi("reproduce", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert "--minutes is for baselines and latency" in err
    assert not (tmp_path / "out").exists()


def test_minutes_change_the_scale_that_is_run(didi, tiny, tmp_path, monkeypatch):
    asked = []

    def lasting(scale, minutes, out, **options):
        asked.append(minutes)
        raise UserError("enough")

    monkeypatch.setattr(experiments, "lasting", lasting)
    code, _, err = didi("reproduce", "baselines", "--minutes", 1.5, "--out", tmp_path / "out")
    assert (code, asked) == (2, [1.5])
    assert "enough" in err


def test_a_dry_run_lists_the_rivals_that_were_asked_for(didi, tmp_path):
    arguments = ("--rivals", "ar, sdtt", "--out", tmp_path / "new", "--dry-run")
    code, out, _ = didi("reproduce", "baselines", *arguments)
    assert code == 0
    trained = {line.split()[0] for line in out.splitlines() if "  to do  " in line}
    assert {"teacher", "ar", "sdtt-seed0", "didi-seed0"} <= trained
    assert not {name for name in trained if name.startswith(("duo", "dimo", "jump"))}


def test_a_dry_run_counts_the_minutes_that_were_asked_for(didi, tmp_path):
    """Students of twenty minutes each and the short runs that pace them; their teacher's steps."""
    arguments = ("reproduce", "baselines", "--out", tmp_path / "new", "--dry-run")
    code, plain, _ = didi(*arguments)
    assert code == 0
    code, out, _ = didi(*arguments, "--minutes", 20)
    assert code == 0
    told = {line.split()[0]: line.split("  to do")[-1].split("  ") for line in out.splitlines()}
    paces = [name for name in told if name.startswith("pace-")]
    assert len(paces) == 6
    assert "pace-" not in plain
    for role in ("sdtt", "dimo", "duo", "jump", "token-matching", "didi"):
        assert "20 GPU-minutes" in [part.strip() for part in told[f"{role}-seed0"]]
    assert "20 GPU-minutes" not in "".join(told["duo-teacher"])
    assert "2 GPU-hours" in out, "six students"
    assert "students train 20 minutes each" in out
    assert not (tmp_path / "new").exists()
