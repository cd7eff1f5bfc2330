"""The command line as people meet it: exit codes, one-line errors, JSON."""

import json
import subprocess
import sys

import pytest

SHORT = ["train.steps=4", "train.batch_size=8", "train.eval_sequences=16", "model.hidden=32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    flags = [part for s in SHORT for part in ("--set", s)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "didi_instruct",
            "pretrain",
            "oracle-teacher",
            "--out",
            folder,
            *flags,
        ],
        check=True,
        capture_output=True,
    )
    return folder


def test_pretrain_writes_what_eval_and_info_read(didi, trained, tmp_path):
    report = tmp_path / "report.json"
    code, out, _ = didi(
        "eval", trained, "--metrics", "nelbo", "--data", "oracle",
        "--sequences", 64, "--draws", 2, "--json", report,
    )  # fmt: skip
    assert code == 0
    assert "NELBO (upper bound)" in out
    assert "ratio" in out
    written = json.loads(report.read_text())
    assert {"model", "judge", "rows", "reference", "versions"} <= written.keys()
    row = written["rows"][0]
    assert (row["num_sequences"], row["seed"], row["length"]) == (64, 0, 32)
    low, high = row["nelbo_ci95"]
    assert low < row["nelbo"] < high
    assert 1.0 < written["reference"]["entropy"] < 1.6

    code, out, _ = didi("info", trained, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["vocab_size"], facts["mask_id"], facts["length"]) == (65, 64, 32)
    assert facts["parameters"] == facts["trainable_parameters"] > 0
    assert facts["provenance"]["step"] == 4


@pytest.mark.parametrize(
    ("arch", "parameters", "discriminator"),
    [("small", 169_627_218, 131_371_265), ("medium", 424_477_010, 373_747_969)],
)
def test_info_knows_the_papers_architectures(didi, arch, parameters, discriminator):
    code, out, _ = didi("info", "--arch", arch, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["parameters"] == parameters
    assert facts["discriminator_parameters"] == discriminator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "no-such"], "`no-such` is neither a recipe file nor a shipped recipe"),
        (["pretrain", "oracle-teacher", "--set", "optim.lrr=1"], "Did you mean `lr`?"),
        (["pretrain", "oracle-teacher", "--set", "train.steps=0"], "train.steps is 0"),
        (["pretrain", "oracle-teacher", "--set", "train.steps=x"], "a whole number is needed"),
        (["pretrain", "oracle-teacher", "--set", "model.vocab_size=64"], "no room for all of them"),
        (["pretrain", "oracle-teacher", "--set", "model.length=8"], "rows of 32 tokens"),
        (["pretrain", "oracle-teacher", "--device", "cuda:77x"], "not a device"),
        (["pretrain", "stories-teacher"], "data.source is not set"),
        (["pretrain", "stories-teacher", "--set", "data.source=nowhere.txt"], "nowhere.txt"),
        (["pretrain", "oracle-teacher", "--frobnicate"], "frobnicate"),
        (["eval", "nowhere", "--metrics", "nelbo", "--data", "oracle"], "nowhere"),
        (["eval", "nowhere", "--metrics", "nelbos", "--data", "oracle"], "not a metric"),
        (["eval", "nowhere", "--metrics", "nelbo"], "add --data"),
        (["info"], "--arch NAME"),
        (["info", "--arch", "tiny"], "Known: small"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(didi, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = didi(*arguments)
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err + out
    assert not list(tmp_path.rglob("*.safetensors"))


def test_debug_shows_the_traceback(didi):
    code, _, err = didi("info", "nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_version(didi):
    code, out, _ = didi("--version")
    assert code == 0
    assert out.startswith("didi-instruct ")
