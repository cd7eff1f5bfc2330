"""`didi bench` as people meet it."""

import json

import pytest
import torch

from didi_instruct.api.bench import BenchPlan, sweep
from didi_instruct.api.model import Model
from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT

TINY = ["--arch", "small", "--batch", 2, "--steps", 3, "--repeat", 2, "--device", "cpu"]
for setting in ("layers=1", "hidden=16", "heads=2", "vocab_size=20", "length=12"):
    TINY += ["--set", setting]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a model of random weights whose texts have windows of their own."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    config = ModelConfig(
        layers=1, hidden=16, heads=2, cond_dim=4, vocab_size=20, length=12, end_id=0,
        lengths=(0, *[1] * 12),
    )  # fmt: skip
    torch.manual_seed(0)
    Model(DiT(config), config).save(folder)
    return folder


def rows_of(file):
    return json.loads(file.read_text())["rows"]


def test_rows_stand_side_by_side(didi, tmp_path):
    file = tmp_path / "b.json"
    code, out, err = didi("bench", *TINY, "--against", "plain,naive,ar", "--json", file)
    assert code == 0, err
    report = json.loads(file.read_text())
    names = ["small", "trunk", "plain", "naive", "ar"]
    assert [row["name"] for row in report["rows"]] == names
    assert [row["steps"] for row in report["rows"]] == [3, 3, 3, 3, 12]
    for row in report["rows"]:
        assert (row["batch"], row["length"], row["peak_memory_gib"]) == (2, 12, None)
        first = report["rows"][0]["seconds_median"]
        assert row["ratio_to_first"] == pytest.approx(row["seconds_median"] / first)
        assert row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["ms_per_step"] == pytest.approx(1e3 * row["seconds_median"] / row["steps"])
    assert (report["device"], report["dtype"], report["fast"]) == ("CPU", "float32", False)
    assert report["versions"]["torch"] == torch.__version__
    assert all(name in out for name in names)
    assert str(file) in out


def test_a_model_is_timed_against_another(didi, model, tmp_path):
    """Texts have windows of their own here: all rows write as many tokens."""
    file = tmp_path / "b.json"
    arguments = ["--batch", 2, "--steps", 2, "--repeat", 1, "--device", "cpu", "--json", file]
    code, _, err = didi("bench", model, "--against", f"naive,ar,{model}", "--length", 7, *arguments)
    assert code == 0, err
    rows = rows_of(file)
    assert [row["name"] for row in rows] == [str(model), "trunk", "naive", "ar", str(model)]
    assert {row["length"] for row in rows} == {7}


def test_guided_rows_need_a_discriminator(didi, model, tmp_path):
    file = tmp_path / "b.json"
    code, _, err = didi("bench", *TINY, "--guided", "--against", "naive", "--json", file)
    assert code == 0, err
    assert [row["name"] for row in rows_of(file)] == ["small", "trunk", "naive"]
    code, _, err = didi("bench", model, "--guided")
    assert code == 2
    assert "no discriminator" in err


def test_an_iteration_of_distillation_is_timed(didi, tmp_path):
    file = tmp_path / "b.json"
    code, _, err = didi("bench", *TINY, "--distill", "--against", "plain,naive", "--json", file)
    assert code == 0, err
    rows = rows_of(file)
    assert [row["name"] for row in rows] == ["small", "plain", "naive"]
    assert all(row["steps"] == 1 and row["ratio_to_first"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [("length", "16,4", "length"), ("batch", "1,3", "batch"), ("steps", "1,2", "steps"),
     ("vocabulary", "8,30", "vocabulary")],
)  # fmt: skip
def test_a_sweep_is_rows_from_small_to_large(didi, tmp_path, name, values, field):
    """Lengths may pass the architecture's own; ratios are those to the smallest."""
    file = tmp_path / "b.json"
    code, out, err = didi("bench", *TINY, "--sweep", f"{name}={values}", "--json", file)
    assert code == 0, err
    rows = rows_of(file)
    wanted = sorted(map(int, values.split(",")))
    assert [row[field] for row in rows if row["name"] == "small"] == wanted
    assert rows[0]["ratio_to_first"] == 1.0
    assert rows[2]["ratio_to_first"] == pytest.approx(
        rows[2]["seconds_median"] / rows[0]["seconds_median"]
    )
    assert field in out


def test_a_sweep_ends_where_memory_does(monkeypatch):
    """The sizes before it stay, and the row that failed says why."""
    sample = Model.sample

    def small_only(self, num, **settings):
        if num > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return sample(self, num, **settings)

    monkeypatch.setattr(Model, "sample", small_only)
    changes = {"layers": 1, "hidden": 16, "heads": 2, "vocab_size": 20, "length": 6}
    plan = BenchPlan(arch="small", model=changes, steps=1, repeat=1, device="cpu")
    rows = sweep(plan, "batch", (2, 8, 16)).rows
    assert [(row["name"], row["batch"]) for row in rows] == [
        ("small", 2), ("trunk", 2), ("small", 8), ("trunk", 8),
    ]  # fmt: skip
    assert rows[2]["seconds_median"] is None
    assert "out of memory" in rows[2]["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the two"),
        (["x", "--arch", "small"], "one of the two"),
        (["--arch", "tiny"], "not an architecture"),
        ([*TINY, "--set", "layer=1"], "layer"),
        (["x", "--set", "layers=1"], "use it with --arch"),
        ([*TINY, "--batch", 0], "--batch is 0"),
        ([*TINY, "--dtype", "int3"], "not a dtype"),
        ([*TINY, "--guided", "--sampler", "blocks"], "leave out --sampler"),
        ([*TINY, "--sampler", "blocks", "--against", "naive"], "naive"),
        ([*TINY, "--sweep", "depth"], "not a sweep"),
        ([*TINY, "--sweep", "batch=a"], "--sweep batch=a"),
        ([*TINY, "--sweep", "batch=0"], "1 or more"),
        ([*TINY, "--against", "no/such/model"], "no/such/model"),
        ([*TINY, "--distill", "--against", "ar"], "naive"),
        ([*TINY, "--distill", "--guided"], "leave out"),
        ([*TINY, "--json", "no/such/folder/b.json"], "no/such/folder"),
    ],
)
def test_a_mistake_is_one_line(didi, arguments, message):
    code, out, err = didi("bench", *arguments)
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_a_vocabulary_cannot_be_changed(model):
    plan = BenchPlan(source=str(model), device="cpu")
    with pytest.raises(UserError, match="--arch"):
        sweep(plan, "vocabulary", (8,))


def test_a_sweep_leaves_out_lengths_that_a_model_does_not_read(model):
    plan = BenchPlan(source=str(model), batch=1, steps=1, repeat=1, device="cpu")
    rows = sweep(plan, "length", (4, 12, 99)).rows
    assert [row["length"] for row in rows if row["name"] == "trunk"] == [4, 12]
    with pytest.raises(UserError, match="reads 12 tokens"):
        sweep(plan, "length", (99,))


def test_generate_asks_for_the_fast_path(didi, monkeypatch):
    asked = []

    def load(source, **settings):
        asked.append(settings["fast"])
        raise UserError("no more")

    monkeypatch.setattr("didi_instruct.api.model.load", load)
    didi("generate", "x")
    didi("generate", "x", "--fast")
    assert asked == [False, True]
