"""How long a run trained, from its own log."""

from pathlib import Path

from didi_instruct.api.runs import configure
from didi_instruct.config.pretrain import PretrainConfig
from didi_instruct.evaluation.curves import read_log

LOG, RECIPE = "log.jsonl", "recipe.yaml"


def training_minutes(folder: Path) -> float | None:
    """Minutes of the steps of a run; None where the folder has no log of one.

    Wall-clock time of steps alone: evaluations, checkpoints and the drawing of a bank are not in a
    log's rates. Of steps that were made again after an interruption, the last time counts.
    """
    if not (folder / LOG).is_file():
        return None
    records, before, seconds = read_log(folder / LOG), 0.0, 0.0
    rated = [r for r in records if r.get("iterations_per_second") or r.get("tokens_per_second")]
    if not rated:
        return None
    tokens = None
    for record in rated:
        rate = record.get("iterations_per_second")
        if rate is None:
            tokens = tokens or _tokens_per_step(folder)
            rate = record["tokens_per_second"] / tokens
        seconds += (record["step"] - before) / rate
        before = record["step"]
    return seconds / 60


def _tokens_per_step(folder: Path) -> int:
    """Of a pretraining run, whose log has tokens per second alone."""
    config = configure(PretrainConfig, str(folder / RECIPE), ())
    return config.train.batch_size * config.model.row_length
