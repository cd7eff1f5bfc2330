"""`didi distill` as people meet it: the table, exit codes, one-line errors, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.runs import distilling

import didi_instruct as package
from didi_instruct.cli.train import evaluation_line
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.config.schema import parse
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distill import DistillResult
from didi_instruct.distillation import bank
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model
from didi_instruct.training.loop import Outcome

RECIPE = """
method: didi
reference: {source: bank, steps: 2, rows: 32}
discriminator: {lr: 1e-3, trainable_blocks: 1, chance: 0.0, saturation: 1.0}
token_matching: {warmup: 0, budgets: [2, 4]}
optim: {lr: 1e-3}
train: {steps: 3, batch_size: 8, ema: 0.9, log_every: 1, save_every: 2}
watch: {budgets: [2, 4], samples: 16, min_entropy: 0.0}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in, with a random teacher and a short recipe."""
    config = ModelConfig(
        layers=2, hidden=32, heads=2, cond_dim=16, vocab_size=65, length=32,
        schedule=ScheduleConfig(eps=0.0),
    )  # fmt: skip
    torch.manual_seed(0)
    tokenizer = OracleLanguage.default().tokenizer
    save_model(tmp_path / "teacher", build_model(config), config, tokenizer)
    (tmp_path / "short.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_prints_what_was_won_and_can_be_lengthened(didi, place):
    """The table holds the numbers that the product keeps; a second start needs --resume."""
    command = ["distill", "short.yaml", "--teacher", "teacher"]
    code, out, err = didi(*command)
    assert code == 0, err
    folder = place / "runs" / "short"
    facts = json.loads((folder / "config.json").read_text())["provenance"]["quick_evaluation"]
    lines = out.splitlines()
    assert lines[0] == "path KL, nats per sequence (± standard error)"
    assert lines[1].split() == ["steps", "2", "4"]
    rows = {"teacher": ("teacher", ""), "student": ("student", ""), "raw": ("student", "_raw")}
    for line, (title, (model, tag)) in zip(lines[2:5], rows.items(), strict=True):
        cells = [
            f"{facts[model][f'path_kl_{n}{tag}']:.2f} ± {facts[model][f'path_kl_{n}{tag}_se']:.2f}"
            for n in (2, 4)
        ]
        assert re.split(r"\s{2,}", line.strip()) == [title, *cells]
    assert "Distilled 3 iterations" in lines[5]
    assert lines[-1].startswith("Next: didi generate ")
    assert didi(*lines[-1].removeprefix("Next: didi ").split())[0] == 0
    assert "Drawing the teacher's bank" in err
    assert "distill: step 3/3" in err

    code, _, err = didi(*command)
    assert (code, err.count("\n")) == (2, 1)
    assert "already holds a run: resume it" in err
    code, out, err = didi(*command, "--resume", "--set", "train.steps=4")
    assert code == 0, err
    assert "Distilled 4 iterations" in out
    assert f"Resuming from {folder.relative_to(place)}" in err


def test_a_method_is_chosen_without_touching_the_recipe(didi, place, monkeypatch):
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)
    code, out, err = didi(
        "distill", "short.yaml", "--teacher", "teacher", "--method", "token-matching",
        "--out", "run", "--set", "watch.budgets=[]",
    )  # fmt: skip
    assert code == 0, err
    assert "method: token-matching" in (place / "run" / "recipe.yaml").read_text()
    assert not (place / "run" / "discriminator.safetensors").exists()
    assert "path KL" not in out, "nothing was measured"
    assert "No curves.png: matplotlib is missing" in out


@pytest.mark.parametrize(
    ("method", "flags"), [("dimo", "--sampler dimo --steps 1"), ("sdtt", "--steps 128")]
)
def test_a_student_of_any_method_is_sampled_as_the_last_line_says(didi, place, method, flags):
    """Three iterations are three rounds of SDTT: 1,024 steps become 128."""
    command = ["distill", "short.yaml", "--teacher", "teacher", "--method", method, "--out", "run"]
    code, out, err = didi(*command)
    assert code == 0, err
    assert ("watch.budgets=[2, 4] is left out" in err) == (method == "dimo")
    assert out.splitlines()[-1] == f"Next: didi generate run {flags}"
    assert didi("generate", "run", *flags.split())[0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optim.lr=1e30", "optim.clip=0"], "not a number at step 1"),
        (
            [
                "optim.lr=0.3",
                "watch.min_entropy=0.99",
                "discriminator.warmup=40",
                "train.steps=150",
            ],
            "entropy collapse",
        ),
    ],
)
def test_a_run_that_goes_wrong_is_one_line_and_exit_code_1(didi, place, settings, message):
    flags = [part for s in settings for part in ("--set", s)]
    code, out, err = didi("distill", "short.yaml", "--teacher", "teacher", "--out", "run", *flags)
    assert code == 1, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("didi: ")
    assert message in last
    assert "Last good checkpoint" in last
    assert "Traceback" not in out + err
    assert not (place / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["short.yaml"], "Missing option '--teacher'"),
        (["--teacher", "teacher"], "Missing argument"),
        (["short.yaml", "--teacher", "nowhere"], "`nowhere` is no file or folder here"),
        (["no-such", "--teacher", "teacher"], "`no-such` is neither a recipe file nor a shipped"),
        (["short.yaml", "--method", "magic"], "choose one of didi, token-matching"),
        (["short.yaml", "--set", "didi.group_sise=2"], "Did you mean `group_size`?"),
        (["short.yaml", "--set", "didi.group_size=1"], "didi.group_size is 1"),
        (["short.yaml", "--set", "train.steps"], "write it as section.key=value"),
        (["short.yaml", "--set", "optim.lr=fast"], "`optim.lr` is 'fast'"),
        (["short.yaml", "--set", "model.hidden=64"], "`model` is not a setting"),
        (["short.yaml", "--set", "prompt=8"], "--set data.source="),
        (["oracle-teacher"], "oracle-teacher.yaml is a recipe for `didi pretrain`."),
        (["short.yaml", "--out", "short.yaml"], "is a file"),
        (["short.yaml", "--out", "teacher"], "is not empty"),
        (["short.yaml", "--resume"], "holds no run to resume"),
        (["short.yaml", "--device", "cuda:77x"], "not a device"),
        (["short.yaml", "--frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(didi, place, arguments, message):
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    needs_teacher = "--teacher" not in arguments and "'--teacher'" not in message
    code, out, err = didi("distill", *arguments, *["--teacher", "teacher"] * needs_teacher)
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err + out
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


def test_help_lists_it(didi, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = didi("--help")
    assert code == 0
    assert re.search(r"\bdistill\b.*Distil a teacher", out)
    code, out, _ = didi("distill", "--help")
    assert code == 0
    for flag in ("--teacher", "--method", "--set", "--out", "--resume", "--device"):
        assert flag in out
    assert "token-matching" in out


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(didi, place):
    """SIGINT to the program: exit code 130, a checkpoint of the step it names, --resume works."""
    command = ["distill", "short.yaml", "--teacher", "teacher", "--out", "run"]
    endless = ["--set", "train.steps=100000", "--set", "train.save_every=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "didi_instruct", *command, *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    log = place / "run" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    checkpoint = max((place / "run" / "checkpoints").iterdir())
    step = int(checkpoint.name.removeprefix("step-"))
    saved = checkpoint.relative_to(place)
    assert f"Stopped at step {step}; saved {saved}. Go on with --resume." in out
    assert "Stopping soon" in err
    assert "Traceback" not in err
    assert not (place / "run" / "config.json").exists()
    code, out, _ = didi(*command, "--resume", "--set", f"train.steps={step + 1}")
    assert code == 0
    assert f"Distilled {step + 1} iterations" in out


def test_after_ctrl_c_no_line_advises_a_command_that_would_be_refused(didi, place, monkeypatch):
    """The run is begun: the same command without --resume neither goes on nor starts over."""
    outcome = Outcome(3, signal.SIGINT, place / "run" / "checkpoints" / "step-00000003")
    stopped = DistillResult(place / "run", DistillConfig(), outcome, True)
    monkeypatch.setattr(package, "distill", lambda *_, **__: stopped)
    code, out, err = didi("distill", "short.yaml", "--teacher", "teacher", "--out", "run")
    assert code == 130
    assert "Go on with --resume." in out
    assert "the same command" not in err


def test_ctrl_c_before_the_first_step_is_one_line(didi, place, monkeypatch):
    """While the bank is drawn, say: exit code 130, and the same command starts over."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    command = ["distill", "short.yaml", "--teacher", "teacher", "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(bank, "open_bank", interrupted)
        code, _, err = didi(*command)
    assert code == 130
    assert err.strip() == (
        "didi: interrupted; with --resume it goes on from its last checkpoint, where it has saved "
        "one"
    )
    assert didi(*command)[0] == 0


def test_running_out_of_memory_names_the_remedy(didi, place, monkeypatch):
    def starve(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory: 9 bytes\nx")

    monkeypatch.setattr(package, "distill", starve)
    code, _, err = didi("distill", "short.yaml", "--teacher", "teacher")
    assert code == 1
    assert err.startswith("didi: Out of memory: use smaller batches or texts.")
    assert err.count("\n") == 1


def test_an_evaluation_is_one_short_line():
    values = {
        "path_kl_4": 14.966, "path_kl_4_se": 0.071, "path_entropy_4": 0.51234,
        "unique_4gram_4": 0.9, "path_kl_8": 7.69, "path_kl_8_se": 0.05, "path_entropy_8": 0.6,
        "unique_4gram_8": 0.8, "mistakes_8": 0.5, "path_kl_4_raw": 15.0,
        "valid_nats_per_token": 1.25,
    }  # fmt: skip
    assert evaluation_line(values) == (
        "at 4, 8 steps: path KL 14.97 ± 0.07, 7.69 ± 0.05; path entropy 0.512, 0.600; "
        "unique 4-grams 0.900, 0.800; held-out text 1.2500 nats per token"
    )


@pytest.mark.parametrize(
    ("exact", "prompt", "heading"),
    [
        (True, 0, "path KL, nats per sequence (± standard error)"),
        (False, 0, "judged by the teacher's own bound"),
        (False, 4, "path entropy, nats per token (texts that continue a prompt have no judge"),
    ],
)
def test_the_table_says_who_judges(didi, place, monkeypatch, exact, prompt, heading):
    numbers = {"path_entropy_4": 0.5} if prompt else {"path_kl_4": -1.0, "path_entropy_4": 0.5}
    values = {"prompt": prompt, "data": {"source": "oracle"}, "train": {"ema": 0.0}}
    config = parse(DistillConfig, values, where="test")
    stands = (place / "run", config, Outcome(3, None, None), True)
    found = DistillResult(*stands, teacher=numbers, student=numbers, exact=exact)
    monkeypatch.setattr(package, "distill", lambda *_, **__: found)
    code, out, _ = didi("distill", "short.yaml", "--teacher", "teacher", "--out", "run")
    assert code == 0
    assert heading in out.splitlines()[0]
    assert ("--prompt" in out.splitlines()[-1]) == bool(prompt)
    assert "(the student)" in out, "nothing was averaged"
