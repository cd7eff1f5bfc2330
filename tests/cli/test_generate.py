"""`didi generate` as people meet it."""

import json
import shutil

import pytest
from tests.models.masked_folders import esm

from didi_instruct.config.train import (
    DataConfig,
    ModelRecipe,
    OptimConfig,
    PretrainConfig,
    PretrainTrainConfig,
)
from didi_instruct.hub import sources


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model of a tiny corpus."""
    from didi_instruct.pretrain import pretrain

    folder = tmp_path_factory.mktemp("generate")
    corpus = folder / "corpus.txt"
    corpus.write_text("once upon a time there was a cat in the garden\n" * 400)
    pretrain(
        PretrainConfig(
            model=ModelRecipe(layers=1, hidden=32, heads=2, cond_dim=8, length=24),
            data=DataConfig(source=str(corpus), tokenizer="bpe:300", documents="line"),
            optim=OptimConfig(lr=3e-3),
            train=PretrainTrainConfig(steps=20, batch_size=16, ema=0.5, eval_sequences=8),
        ),
        out=folder / "run",
    )
    return folder / "run"


@pytest.fixture
def didi(didi):
    """Run `didi generate`."""
    return lambda *arguments: didi("generate", *arguments)


def test_text_comes_out_and_the_seed_fixes_it(didi, model):
    code, out, err = didi(model, "--steps", 4, "--prompt", "once upon")
    assert code == 0
    assert out.startswith("once upon")
    assert err == ""
    assert didi(model, "--steps", 4, "--prompt", "once upon")[1] == out
    assert didi(model, "--steps", 4, "--prompt", "once upon", "--seed", 1)[1] != out


def test_json_tells_what_was_done(didi, model):
    code, out, _ = didi(model, "--steps", 4, "--num", 3, "--json", "--temperature", 0.8)
    report = json.loads(out)
    assert code == 0
    assert (report["nfe"], report["steps"], report["seed"]) == (4, 4, 0)
    assert 0 < report["passes"] <= 4
    assert len(report["samples"]) == 3
    for sample in report["samples"]:
        assert len(sample["tokens"]) == 24
        assert sample["log_prob"] < 0


@pytest.mark.skipif(not (sources.root() / "stories").exists(), reason="no model is shipped")
def test_json_for_a_program_leaves_progress_for_its_user(didi, model):
    """Two batches of four steps: lines on standard error, where there is no terminal."""
    _, out, err = didi(model, "--num", 3, "--batch-size", 2, "--steps", 4, "--json")
    assert json.loads(out)["steps"] == 4
    assert "Drawing: 12%" in err
    _, _, err = didi(model, "--num", 1, "--steps", 4)
    assert "Drawing" not in err


def test_a_length_is_that_of_the_tokens(didi):
    """Of a model whose texts have windows of their own, too: what fills them is not told."""
    code, out, err = didi("stories", "--steps", 4, "--length", 16, "--num", 2, "--json")
    assert code == 0, err
    assert [len(sample["tokens"]) for sample in json.loads(out)["samples"]] == [16, 16]


@pytest.fixture(scope="module")
def proteins(tmp_path_factory):
    """A random ESM for chains of up to 28 residues."""
    folder = tmp_path_factory.mktemp("esm")
    esm(folder, max_position_embeddings=30)
    return folder


def test_proteins_of_several_lengths_go_to_a_fasta(didi, proteins, tmp_path):
    """The chains that would be printed, with length, seed and number; `-` prints the file."""
    wish = (proteins, "--lengths", "5,28", "--num", 2, "--steps", 3, "--seed", 4)
    code, out, err = didi(*wish)
    assert code == 0, err
    chains = out.split()
    assert [len(chain) for chain in chains] == [5, 5, 28, 28]
    file = tmp_path / "chains.fasta"
    code, out, err = didi(*wish, "--fasta", file)
    assert (code, out) == (0, "")
    assert f"Wrote {file}: 4 chains" in err
    lines = file.read_text().split()
    assert [line for line in lines if line.isalpha()] == chains
    assert lines[:4] == [">L5_S4_0", "length=5", "seed=4", "index=0"]
    assert didi(*wish, "--fasta", "-")[1] == file.read_text()


def test_a_motif_is_scaffolded(didi, proteins):
    code, out, err = didi(
        proteins, "--infill", "___MKTAYIAK___", "--gap", "10,4", "--sampler", "dplm",
        "--option", "guard=0.25", "--steps", 4,
    )  # fmt: skip
    assert code == 0, err
    chain = out.strip()
    assert (len(chain), chain[10:18]) == (22, "MKTAYIAK")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "lengths is '0'"),
        (["--lengths", "5,29"], "length is 29: this model writes 1 to 28 tokens."),
        (["--prompt", "MJ"], "`J`, letter 2 of the given `MJ`, is no residue"),
        (["--fasta", "no/such/folder/x"], "--fasta no/such/folder/x"),
        (["--fasta", "-", "--json"], "--fasta - and --json both print"),
        (["--sampler", "dplm", "--option", "guard=2"], "guard is 2"),
        (["--sampler", "dplm", "--option", "draw=best"], "draw"),
    ],
)
def test_a_mistake_about_proteins_is_one_line(didi, proteins, arguments, message):
    code, out, err = didi(proteins, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_gaps_are_filled(didi, model):
    code, out, _ = didi(model, "--infill", "once ___ time ___ garden", "--gap", "2-4")
    assert code == 0
    assert out.startswith("once")
    assert out.rstrip().endswith("garden")


@pytest.mark.parametrize("suffix", ["html", "json"])
def test_a_trace_is_written(didi, model, tmp_path, suffix):
    file = tmp_path / f"trace.{suffix}"
    code, out, err = didi(model, "--steps", 3, "--trace", file)
    assert code == 0
    assert str(file) in err
    content = file.read_text()
    if suffix == "json":
        sample = json.loads(content)["samples"][0]
        assert sample["text"] + "\n" == out
        assert len(sample["steps"]) == 3
    else:
        assert content.rstrip().endswith("</html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps is 0"),
        (["--sampler", "magic"], "not a sampler"),
        (["--sampler", "rgas"], "needs a discriminator"),
        (["--prompt", "once upon a time " * 30], "nothing is left to write"),
        (["--infill", "no gap"], "no gap"),
        (["--gap", "x", "--infill", "a ___ b"], "--gap x"),
        (["--option", "gird=cosine"], "Did you mean `grid`"),
        (["--option", "grid"], "--option grid: write it as key=value."),
        (["--top-p", "0"], "top_p is 0"),
        (["--trace", "x.mp4"], "x.mp4"),
        (["--fasta", "x.fasta"], "writes text, not proteins"),
        (["--trace", "no/such/folder/x.html"], "no/such/folder"),
    ],
)
def test_a_mistake_is_one_line(didi, model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = didi(model, *arguments)
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out
    assert not list(tmp_path.iterdir())


def test_without_a_model_the_shipped_one_writes(didi, model, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "root", lambda: tmp_path / "shipped")
    code, _, err = didi()
    assert code == 2
    assert "`stories` ships with didi, but is not in" in err
    shutil.copytree(model, tmp_path / "shipped" / "stories" / "student")
    assert didi("--steps", 4) == didi(model, "--steps", 4)
    assert json.loads(didi("--json")[1])["model"] == "stories"
