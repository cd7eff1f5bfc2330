"""`didi bench` as people meet it."""

import json
from types import SimpleNamespace

import pytest
import torch

from didi_instruct.benchmarking import rivals
from didi_instruct.benchmarking.bench import sweep
from didi_instruct.benchmarking.cases import note
from didi_instruct.benchmarking.naive_distillation import ITERATIONS
from didi_instruct.config.bench import BenchConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.ar import ARModel
from didi_instruct.models.dit import DiT

CHANGES = {"layers": 1, "hidden": 16, "heads": 2, "vocab_size": 20, "length": 12}
BARE = ["--arch", "small", "--batch", 2, "--repeat", 2, "--device", "cpu"]
for name, value in CHANGES.items():
    BARE += ["--set", f"{name}={value}"]
TINY = [*BARE, "--steps", 3]


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


@pytest.fixture(scope="module")
def left_to_right(tmp_path_factory):
    """A folder of a left-to-right model, whose texts end by themselves."""
    folder = tmp_path_factory.mktemp("bench") / "ar"
    config = ModelConfig(
        kind="ar", layers=1, hidden=16, heads=2, vocab_size=20, length=12, end_id=0
    )
    Model(ARModel(config), config).save(folder)
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """Settings of all samples that are drawn."""
    settings, draw = [], Model.draw

    def watched(self, num, **given):
        settings.append(given)
        return draw(self, num, **given)

    monkeypatch.setattr(Model, "draw", watched)
    return settings


def rows_of(file):
    return json.loads(file.read_text())["rows"]


def test_rows_stand_side_by_side(didi, tmp_path):
    file = tmp_path / "b.json"
    code, out, err = didi(
        "bench", *TINY, "--against", "plain,naive,ar,transformers", "--json", file
    )
    assert code == 0, err
    report = json.loads(file.read_text())
    names = ["small", "trunk", "plain", "naive", "ar", "transformers"]
    assert [row["name"] for row in report["rows"]] == names
    assert [row["steps"] for row in report["rows"]] == [3, 3, 3, 3, 12, 12]
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


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--sampler", "first-hitting"], 70),
        (["--sampler", "blocks", "--steps", 2], 6),  # 70 tokens are 3 blocks of 32
        (["--sampler", "confidence", "--steps", 2], 2),
    ],
)
def test_steps_are_those_that_ran(didi, tmp_path, arguments, steps, monkeypatch):
    """Of the model and of its floor, whose passes are counted."""
    passes, trunk = [], DiT.trunk
    monkeypatch.setattr(DiT, "trunk", lambda self, *a: passes.append(len(a[0])) or trunk(self, *a))
    file = tmp_path / "b.json"
    changed = [*BARE, "--length", 70, "--batch", 3, "--repeat", 1, *arguments, "--json", file]
    code, _, err = didi("bench", *changed)
    assert code == 0, err
    rows = rows_of(file)
    assert [(row["name"], row["steps"]) for row in rows] == [("small", steps), ("trunk", steps)]
    for row in rows:
        assert row["ms_per_step"] == pytest.approx(1e3 * row["seconds_median"] / steps)
    assert passes[-steps:] == [3] * steps


@pytest.mark.parametrize("order", ["random", "streams"])
def test_the_plain_way_reveals_in_the_order_of_the_model(didi, order, monkeypatch):
    orders, plain = [], rivals.NaiveSampler

    def watched(*, order, **settings):
        orders.append(order)
        return plain(order=order, **settings)

    monkeypatch.setattr(rivals, "NaiveSampler", watched)
    code, _, err = didi("bench", *TINY, "--set", f"order={order}", "--against", "naive")
    assert code == 0, err
    assert set(orders) == {order}


def test_other_models_are_sampled_alike(didi, model, drawn):
    code, _, err = didi("bench", *TINY, "--sampler", "confidence", "--against", f"{model},plain")
    assert code == 0, err
    assert len(drawn) == 9
    assert {(given["sampler"], given["steps"]) for given in drawn} == {("confidence", 3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "confidence"], "`confidence` does not sample models of kind ar"),
        (["--guided"], "has no discriminator"),
        (["--length", 13], "writes 1 to 12 tokens"),
        (["--set", "length=40"], "up to 12: add --length 12"),
        (["--sweep", "length=13,14"], "reads 12 tokens"),
    ],
)
def test_other_models_that_cannot_be_sampled_alike_are_named(
    didi, left_to_right, drawn, arguments, message
):
    """Before anything is timed."""
    code, out, err = didi("bench", *TINY, "--against", left_to_right, *arguments)
    assert (code, out, drawn) == (2, "", [])
    assert message in err
    assert str(left_to_right) in err
    assert len(err.strip().splitlines()) == 1


def test_a_left_to_right_model_takes_a_step_per_token(didi, left_to_right, tmp_path):
    """Steps are for the others; that its texts may end early is said."""
    file = tmp_path / "b.json"
    code, out, err = didi("bench", *TINY, "--against", left_to_right, "--json", file)
    assert code == 0, err
    last = rows_of(file)[-1]
    assert 1 <= last["steps"] <= 12
    assert last["note"] == "texts that end early count in full"
    assert f"{left_to_right}: texts that end early count in full" in out


def test_what_cannot_be_captured_on_a_gpu_is_remarked():
    config = ModelConfig(kind="ar", layers=1, hidden=16, heads=2, vocab_size=20)
    model = SimpleNamespace(
        config=config, device=torch.device("cuda"), is_accelerated=False, tokenizer=None,
        network=ARModel(config),
    )  # fmt: skip
    plan = BenchConfig(source="x")
    assert "neither compiled nor captured" in note(model, plan)
    assert note(model, BenchConfig(source="x", fast=False)) is None
    model.is_accelerated = True
    assert note(model, plan) is None


def test_guided_rows_need_a_discriminator(didi, model, tmp_path, drawn):
    file = tmp_path / "b.json"
    code, _, err = didi("bench", *TINY, "--guided", "--against", "naive", "--json", file)
    assert code == 0, err
    assert [row["name"] for row in rows_of(file)] == ["small", "trunk", "naive"]
    drawn.clear()
    for arguments in (["--guided"], ["--sampler", "rgas"]):
        code, _, err = didi("bench", model, *arguments)
        assert code == 2
        assert "no discriminator" in err
    assert not drawn


def test_an_iteration_of_distillation_is_timed(didi, tmp_path):
    file = tmp_path / "b.json"
    rivals = "plain,naive"
    code, _, err = didi("bench", *BARE, "--distill", "--against", rivals, "--json", file)
    assert code == 0, err
    rows = rows_of(file)
    assert [row["name"] for row in rows] == ["small", "plain", "naive"]
    assert all(row["steps"] == ITERATIONS and row["ratio_to_first"] > 0 for row in rows)


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
    draw = Model.draw

    def small_only(self, num, **settings):
        if num > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return draw(self, num, **settings)

    monkeypatch.setattr(Model, "draw", small_only)
    plan = BenchConfig(arch="small", model=CHANGES, steps=1, repeat=1, device="cpu")
    rows = sweep(plan, "batch", (2, 8, 16)).rows
    assert [(row["name"], row["batch"]) for row in rows] == [
        ("small", 2), ("trunk", 2), ("small", 8), ("trunk", 8),
    ]  # fmt: skip
    assert rows[2]["seconds_median"] is None
    assert "out of memory" in rows[2]["note"]


@pytest.mark.parametrize("name", ["batch", "length", "vocabulary"])
def test_a_sweep_keeps_what_it_has_where_the_next_is_too_large_to_be_built(name):
    """As a row without a time."""
    plan = BenchConfig(arch="small", model=CHANGES, batch=2, steps=1, repeat=1, device="cpu")
    rows = sweep(plan, name, (3, 10**14)).rows
    assert [row["name"] for row in rows] == ["small", "trunk", "small"]
    assert [row["seconds_median"] is None for row in rows] == [False, False, True]
    assert [row[name] for row in rows] == [3, 3, 10**14]
    assert rows[-1]["note"]


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
        ([*BARE, "--distill", "--against", "ar"], "naive"),
        ([*BARE, "--distill", "--guided"], "leave out"),
        ([*TINY, "--dtype", "float8"], "float8 was removed: use bfloat16"),
        ([*BARE, "--distill", "--dtype", "float8"], "use bfloat16"),
        ([*BARE, "--distill", "--sweep", "batch"], "leave out"),
        ([*TINY, "--distill"], "leave out --steps"),
        ([*TINY, "--sampler", "first-hitting"], "leave out --steps"),
        ([*TINY, "--json", "."], "--json"),
        ([*TINY, "--json", "/dev/null"], "--json"),
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
    plan = BenchConfig(source=str(model), device="cpu")
    with pytest.raises(UserError, match="--arch"):
        sweep(plan, "vocabulary", (8,))


def test_a_sweep_leaves_out_lengths_that_a_model_does_not_read(model):
    plan = BenchConfig(source=str(model), batch=1, steps=1, repeat=1, device="cpu")
    rows = sweep(plan, "length", (4, 12, 99)).rows
    assert [row["length"] for row in rows if row["name"] == "trunk"] == [4, 12]
    with pytest.raises(UserError, match="reads 12 tokens"):
        sweep(plan, "length", (99,))


def test_a_sweep_leaves_out_lengths_that_another_model_does_not_read(model):
    plan = BenchConfig(
        arch="small", model=CHANGES, against=(str(model),), batch=1, steps=1, repeat=1,
        device="cpu",
    )  # fmt: skip
    rows = sweep(plan, "length", (4, 12, 99)).rows
    assert [row["length"] for row in rows if row["name"] == str(model)] == [4, 12]


def test_generate_asks_for_the_fast_path(didi, monkeypatch):
    asked = []

    def load(source, **settings):
        asked.append(settings["fast"])
        raise UserError("no more")

    monkeypatch.setattr("didi_instruct.model.load", load)
    didi("generate", "x")
    didi("generate", "x", "--fast")
    assert asked == [False, True]
