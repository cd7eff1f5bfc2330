"""`didi eval` of proteins: tables by length, files of chains, judges, one-line errors."""

import json
import random
import re
import shutil

import pytest
import torch
from tests.models.masked_folders import esm
from tests.random_models import add_noise, save_random

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import AMINO_ACIDS, Tokenizer
from didi_instruct.evaluation import metrics, protein_metrics
from didi_instruct.evaluation.samples import read_samples
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.proteins.clusters import Clusters
from didi_instruct.proteins.folding import FoldSettings, fold
from didi_instruct.proteins.folding_model import write_random_folding

FEW = ["--steps", "2", "--num", "12", "--out", "out"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A tiny ESM, a left-to-right model with its tokens, a model of words, real chains."""
    folder = tmp_path_factory.mktemp("proteins")
    (folder / "esm").mkdir()
    esm(folder / "esm", max_position_embeddings=34)
    torch.manual_seed(0)
    shape = {"layers": 1, "hidden": 32, "heads": 2, "cond_dim": 16, "length": 32}
    config = ModelConfig(**shape, kind="ar", vocab_size=34)
    tokenizer = Tokenizer.load(folder / "esm")
    save_model(folder / "ar", add_noise(build_model(config), 0.2), config, tokenizer=tokenizer)
    draw = random.Random(0)
    chains = ["".join(draw.choices(AMINO_ACIDS, k=draw.randint(16, 30))) for _ in range(900)]
    text = "".join(f">{n}\n{s}\n" for n, s in enumerate(chains))
    (folder / "real.fasta").write_text(text)
    (folder / "bad.fasta").write_text(">a\nMKV\n>b\nMK?V\n")
    return folder


@pytest.fixture
def place(shelf, tmp_path, monkeypatch):
    """A folder to stand in, without MMseqs2, and short trainings."""
    for path in shelf.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "AR_STEPS", 2)
    monkeypatch.setattr(metrics, "TEST_STEPS", 2)
    return tmp_path


@pytest.fixture
def pretend_mmseqs(monkeypatch):
    """All chains differ."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    given = lambda chains: Clusters(tuple(range(len(chains))), None, 0)  # noqa: E731
    monkeypatch.setattr(protein_metrics, "cluster", given)


def test_rows_are_by_length_with_means_and_baselines(didi, place, pretend_mmseqs):
    asked = ["--metrics", "repeats,composition,clusters,entropy", "--lengths", "16,20"]
    code, out, err = didi(
        "eval", "esm", *FEW, *asked, "--reference", "real.fasta", "--json", "out.json"
    )
    assert (code, "Traceback" in err) == (0, False), err
    found = json.loads((place / "out.json").read_text())
    names = [(row["model"], row["steps"], row["length"]) for row in found["rows"]]
    assert names == [
        ("esm", 2, 16), ("esm", 2, 20), ("esm", 2, None),
        ("real", None, 16), ("real", None, 20), ("real", None, None),
        ("shuffled", None, 16), ("shuffled", None, 20), ("shuffled", None, None),
    ]  # fmt: skip
    first, second, mean, *others = found["rows"]
    for key in ("commonest_residue", "dimer_js", "dimer_js_floor", "entropy"):
        assert mean[key] == pytest.approx((first[key] + second[key]) / 2)
    real, shuffled = others[0], others[3]
    assert real["num_samples"] == shuffled["num_samples"] == 12
    for key in ("commonest_residue", "residue_js", "entropy"):
        assert real[key] == pytest.approx(shuffled[key])
    assert found["reference"]["entropy"] == others[2]["entropy"]
    for words in ("esm · length 16", "esm · mean over lengths", "shuffled, length 20"):
        assert words in out
    page, text = ((place / "out" / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert "shuffled, mean over lengths" in page
    assert "shuffled, length 16" in text
    assert "2-mer JS" in text


def test_the_default_is_40_chains(didi, place):
    code, _, err = didi(
        "eval", "esm", "--steps", "1", "--metrics", "repeats", "--length", "8", "--json", "o.json"
    )
    assert code == 0, err
    assert json.loads((place / "o.json").read_text())["rows"][0]["num_samples"] == 40


def test_a_fasta_file_is_measured_without_a_model(didi, place):
    code, out, err = didi(
        "eval", "real.fasta", "--metrics", "repeats,composition", "--reference", "real.fasta",
        "--out", "out", "--json", "o.json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads((place / "o.json").read_text())["rows"]
    assert [row["model"] for row in found] == ["real.fasta", "real", "shuffled"]
    assert (found[0]["num_samples"], found[0]["steps"]) == (900, None)
    assert found[0]["residue_js"] == pytest.approx(0, abs=1e-12)
    assert "real.fasta" in out


def test_measures_of_text_work_for_proteins(didi, place):
    """Perplexity, path KL, the AR bound and the two-sample test under a left-to-right judge."""
    code, _, err = didi(
        "eval", "esm", "--steps", "4", "--num", "64", "--lengths", "16,20", "--out", "out",
        "--metrics", "ppl,entropy,path-kl,ar-kl,c2st", "--judge", "ar",
        "--reference", "real.fasta", "--json", "o.json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads((place / "o.json").read_text())["rows"]
    for row in found[:3]:
        for key in ("ppl", "path_kl", "ar_kl", "c2st_auc"):
            assert row[key] is not None, key
        assert row["path_kl"] == pytest.approx(row["path_kl"])
    assert found[0]["path_kl_exact"] is True


def test_files_of_chains_are_judged_in_the_tokens_that_are_given(didi, place):
    asked = ["--metrics", "ppl,entropy", "--judge", "ar", "--out", "out"]
    code, _, err = didi("eval", "real.fasta", *asked, "--tokenizer", "ar", "--json", "o.json")
    assert code == 0, err
    assert json.loads((place / "o.json").read_text())["rows"][0]["ppl"] > 1
    code, _, err = didi("eval", "real.fasta", *asked)
    assert code == 2
    assert "--tokenizer" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["esm", "--metrics", "composition", "--reference", "bad.fasta"], r"bad.fasta:4: '\?'"),
        (["bad.fasta", "--metrics", "repeats"], "bad.fasta:4"),
        (["esm", "--metrics", "repeats", "--lengths", "16,99"], "--length 99: esm writes 1 to 32"),
        (["esm", "--metrics", "repeats", "--lengths", "16,x"], "--lengths 16,x: whole numbers"),
        (["esm", "--metrics", "repeats", "--lengths", "8", "--length", "8"], "leave out one"),
        (["esm", "--metrics", "novelty"], "add --reference FASTA"),
        (["esm", "--metrics", "plddt"], "add --folding SOURCE"),
        (["esm", "--metrics", "clusters", "--num", "1"], "needs 2 samples: raise --num"),
        (["words", "--metrics", "repeats"], "measures proteins, and words writes words"),
        (
            ["esm", "--metrics", "c2st", "--num", "64", "--reference", "real.fasta", "--length",
             "32"],
            "real.fasta has no chain of 32 to 35",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(didi, place, monkeypatch, arguments, message):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    words = OracleLanguage.default().tokenizer
    save_random(place / "words", tokenizer=words)
    code, out, err = didi("eval", *arguments, "--out", "out")
    assert code == 2, (out, err)
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert not (place / "out" / "samples").exists()


def test_plddt_is_that_of_the_folding_model(didi, place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folding")
    write_random_folding(folder)
    code, out, err = didi(
        "eval", "esm", "--metrics", "plddt", "--steps", "2", "--num", "3", "--lengths", "5,8",
        "--folding", folder, "--out", "out", "--json", "o.json", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    first, second, mean = json.loads((place / "o.json").read_text())["rows"]
    for row in (first, second):
        (file,) = [
            path
            for path in (place / "out" / "samples").iterdir()
            if read_samples(path).tokens.shape[1] == row["length"]
        ]
        chains = read_samples(file).texts
        folds = fold(chains, FoldSettings(source=folder, cache=place / "other"))
        assert row["plddt"] == pytest.approx(sum(f.plddt for f in folds) / 3)
        assert row["plddt_failed"] == 0
    assert mean["plddt"] == pytest.approx((first["plddt"] + second["plddt"]) / 2)
    assert "pLDDT" in out


def test_mmseqs_is_missed_before_anything_is_drawn(didi, place, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, _, err = didi("eval", "esm", "--metrics", "clusters", *FEW)
    assert code == 2
    assert "apt install mmseqs2" in err
    assert not (place / "out" / "samples").exists()
