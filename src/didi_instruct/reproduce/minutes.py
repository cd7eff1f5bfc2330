"""How long a run trained, on how many texts, and how often its student learnt, by its own files."""

from pathlib import Path
from typing import Any

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.config.schema import read_yaml
from didi_instruct.config.train import PretrainConfig
from didi_instruct.distillation.bank import drawing_seconds
from didi_instruct.evaluation.training_curves import read_log

LOG, RECIPE = "log.jsonl", "recipe.yaml"
SHARED = "shared-gpu"
"""A file beside a run that shared its GPU, at any time: its rates compare with nothing."""


def training_minutes(folder: Path) -> float | None:
    """Minutes of the steps of a run; None where the folder has no log of one, or shared its GPU.

    Wall-clock time of steps alone: evaluations, checkpoints and the drawing of a bank are not in a
    log's rates, and the first steps, in which kernels are compiled, count as no slower than those
    after them. Of steps that were made again after an interruption, the last time counts.
    """
    if not (folder / LOG).is_file() or (folder.parent / SHARED).exists():
        return None
    records, before, seconds = read_log(folder / LOG), 0.0, 0.0
    rated = [r for r in records if r.get("iterations_per_second") or r.get("tokens_per_second")]
    if not rated:
        return None
    size = None if "iterations_per_second" in rated[0] else _tokens_per_step(folder)
    rates = [r["tokens_per_second"] / size if size else r["iterations_per_second"] for r in rated]
    for record, rate in zip(rated, [max(rates[:2]), *rates[1:]], strict=True):
        seconds += (record["step"] - before) / rate
        before = record["step"]
    return seconds / 60


def bank_minutes(folder: Path) -> float | None:
    """Minutes in which the bank that a run reads was drawn, 0 where it reads none.

    None where nobody knows: the run shared its GPU, or the bank is gone.
    """
    if not (folder / RECIPE).is_file() or "method" not in read_yaml(folder / RECIPE):
        return 0.0
    config = load_recipe(DistillConfig, str(folder / RECIPE))
    if not config.reads_bank:
        return 0.0
    bank = Path(config.reference.bank) if config.reference.bank else folder / "bank"
    seconds = None if (folder.parent / SHARED).exists() else drawing_seconds(bank)
    return None if seconds is None else seconds / 60


def training_texts(folder: Path) -> int | None:
    """Texts of all steps together, a text counted as often as it was read or written."""
    if not (folder / RECIPE).is_file():
        return None
    kind: Any = DistillConfig if "method" in read_yaml(folder / RECIPE) else PretrainConfig
    config = load_recipe(kind, str(folder / RECIPE))
    texts: int = config.iterations * config.train.batch_size
    return texts


def learning(folder: Path) -> dict[str, Any]:
    """How many steps changed a student (`updates`) of all (`updates_of`), and why not all.

    A student waits while its discriminator warms up or is at chance; one that always waited is its
    teacher. A discriminator waits while it is saturated. `at_chance` and `saturated` are shares of
    all steps. Empty for a run without a discriminator.
    """
    if not (folder / LOG).is_file():
        return {}
    told = {r["step"]: r for r in read_log(folder / LOG) if "student_waits" in r}
    waited, chance, saturated, before = 0.0, 0.0, 0.0, 0.0
    for _, record in sorted(told.items()):
        steps = record["step"] - before
        waited += steps * record["student_waits"]
        chance += steps * record.get("at_chance", 0.0)
        saturated += steps * record.get("disc_waits", 0.0)
        before = record["step"]
    if not before:
        return {}
    return {
        "updates": round(before - waited),
        "updates_of": round(before),
        "at_chance": chance / before,
        "saturated": saturated / before,
    }


def _tokens_per_step(folder: Path) -> int:
    """Of a pretraining run, whose log has tokens per second alone."""
    config = load_recipe(PretrainConfig, str(folder / RECIPE), ())
    return config.train.batch_size * config.model.row_length
