"""Files and settings of the downstream tasks, as a folder that the user gives holds them."""

from collections.abc import Mapping
from pathlib import Path

from didi_instruct.data.sources import find_sources
from didi_instruct.errors import UserError

NAMES = ("mmlu", "pubmed", "mrpc")
"""Items of downstream tasks, and what the folder of each is called."""
SHARE = 0.5
"""Of MMLU's test questions to learn from, where there is no training split."""


def find_tasks(folder: str | None) -> dict[str, str]:
    """The files of each task: DIR/mmlu, DIR/mrpc, and DIR/pubmed or DIR/pubmed.jsonl."""
    if folder is None:
        return {}
    found = {}
    for name in NAMES:
        paths = sorted(p for p in Path(folder).glob(f"{name}*") if p.name.split(".")[0] == name)
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths)
            raise UserError(f"--tasks {folder}: {names} are both files of {name}: leave one.")
        if paths:
            found[name] = str(paths[0])
    if not found:
        raise UserError(
            f"--tasks {folder}: has no mmlu/, mrpc/ or pubmed.jsonl, the files of the tasks."
        )
    return found


def learning_share(tasks: Mapping[str, str]) -> tuple[str, ...]:
    """Overrides that cut a part of MMLU's test split to learn from, where it has no other."""
    if "mmlu" not in tasks or _has_train(tasks["mmlu"]):
        return ()
    return (f"answers.share={SHARE}",)


def scored_share(tasks: Mapping[str, str]) -> dict[str, float]:
    """Options that score the other part."""
    return {"sft_share": SHARE} if learning_share(tasks) else {}


def _has_train(folder: str) -> bool:
    return any("auxiliary_train" in source.name for source in find_sources(folder))
