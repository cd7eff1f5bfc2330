"""Second part of the demo: a short distillation where every number is exact.

A tiny teacher learns the built-in language, whose likelihood is known; a student with eight codes
learns from it to write in 4 and 8 steps; then both are drawn from and compared.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import didi_instruct as didi
from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.evaluation.report import Report
from didi_instruct.training.reporting import TerminalReporter

STEPS = (2, 4, 8, 16)
MOST_STEPS = 64
"""Steps of the teacher that the gap is measured to."""

SHORT = (
    "mixture.codes=8", "train.batch_size=64", "train.ema=0.9", "optim.warmup=20",
    "watch.samples=128",
)  # fmt: skip
"""What makes the recipe `oracle-mixture` one for two cores, with some of its gain."""


def train(out: Path, steps: int) -> Path:
    """Pretrain the teacher, or go on where an interrupted demo stopped."""
    return _trained(out / "teacher", didi.pretrain, "oracle-teacher", [f"train.steps={steps}"])


def distil(out: Path, teacher: Path, steps: int) -> Path:
    """Distil the student, or go on."""
    overrides = [*SHORT, f"train.steps={steps}"]
    return _trained(out / "student", didi.distill, "oracle-mixture", overrides, teacher=teacher)


def _trained(
    folder: Path, run: Any, recipe: str, overrides: Sequence[str], **settings: Any
) -> Path:
    if (folder / "config.json").exists():
        print(f"Using the {folder.name} in {folder} (delete the folder to train again)")
        return folder
    result = run(
        recipe,
        overrides=[*overrides, "train.save_every=100"],
        out=folder,
        resume=(folder / "recipe.yaml").exists(),
        reporter=TerminalReporter(folder.name),
        **settings,
    )
    if not result.finished:
        sys.exit("Stopped and saved; `make demo` goes on from there.")
    return folder


def compare(out: Path, teacher: Path, student: Path, num: int) -> Report:
    """Draw from both and measure, like `didi eval STUDENT --against TEACHER --judge oracle`."""
    config = EvalConfig(
        metrics=("ppl", "entropy", "path-kl", "unique-4gram"),
        steps=STEPS,
        most_steps=MOST_STEPS,
        num=num,
        batch_size=256,
    )
    found = didi.evaluate(
        str(student), config, out=out / "evaluation", judge="oracle", baseline=str(teacher)
    )
    title = "The oracle language: student and teacher"
    return Report.build(found, title, provenance=provenance(), command="make demo")
