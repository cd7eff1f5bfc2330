"""Give a tokenizer to a teacher that brings none, by writing it once in our layout.

The public models of the DiT family come without the tokenizer that they were trained with, and
everything that a table needs of a teacher (texts, banks, students) depends on one.
"""

from pathlib import Path

from didi_instruct.hub.export import convert
from didi_instruct.hub.sources import find_shipped, find_source
from didi_instruct.models.checkpoint import is_ours
from didi_instruct.reproduce.jobs import WORDS, Context, Job
from didi_instruct.reproduce.running import RUN

ADOPT = "adopt"


def adopted(source: str, tokenizer: str) -> Job:
    """The teacher `source` with a tokenizer: its own, or this one where it brings none."""
    return Job(name="teacher", does=ADOPT, inputs={"model": source, WORDS: tokenizer})


def adopt(context: Context) -> dict[str, bool]:
    """Write the model to where a training run would have it; tell whether it was given words."""
    source, folder = context.inputs["model"], context.folder / RUN
    given = find_source(source).peek().tokenizer is None
    if not is_ours(folder):  # else it was written by a run that stopped right after
        convert(source, folder, "didi", tokenizer=context.inputs[WORDS] if given else None)
    return {"given": given}


def given_source(model: Job | str) -> str | None:
    """Source that the user named for a model, given a tokenizer or not."""
    if isinstance(model, str):
        return model
    return str(model.inputs["model"]) if model.does == ADOPT else None


def here(source: str) -> Path | None:
    """Local path of a model, the hub's cache included; None if it is not on this machine."""
    path = find_shipped(source) or Path(source).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        return None
