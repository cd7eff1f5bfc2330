"""Models that come with the package: folders of our layout under `shipped/`, found by name.

`shipped/stories/student` is `stories`, what is meant where nobody names a model;
`shipped/stories/teacher` is `stories/teacher`. What is there is what is shipped: no list is kept.

A shipped name is a SOURCE and means the same wherever one stands, so it is looked up before the
disk. `./stories`, or a `Path`, is always the folder. Where a folder of that name is itself a model
of ours, whoever wrote the name may have meant either, and is asked to say which.
"""

from importlib import resources
from pathlib import Path

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import is_ours

DEFAULT = "stories"
STUDENT = "student"
"""The folder that a name means without a second part."""

EXPECTED = (DEFAULT, f"{DEFAULT}/teacher")
"""What every installation has: never looked for on the hub."""


def root() -> Path:
    """Where shipped models lie; the folder need not exist."""
    return Path(str(resources.files("didi_instruct") / "shipped"))


def shipped() -> dict[str, Path]:
    """Folder of each shipped model, by its name."""
    return {_name(folder): folder for folder in sorted(root().glob("*/*")) if is_ours(folder)}


def shipped_name(folder: Path) -> str | None:
    """Return the name that a model in this folder has or would have, None outside the package."""
    return _name(folder) if folder.parent.parent == root().resolve() else None


def _name(folder: Path) -> str:
    name = folder.parent.name
    return name if folder.name == STUDENT else f"{name}/{folder.name}"


def find_shipped(source: str | Path) -> Path | None:
    """Return the folder of a shipped model, None where `source` is no such name."""
    if isinstance(source, Path):
        return None
    folder = shipped().get(source)
    if folder is not None and is_ours(Path(source)):
        raise UserError(
            f"`{source}` is a model that ships with didi, and a model folder here: write "
            f"./{source} for the folder, {folder} for the other."
        )
    return folder


def refuse_missing(source: str) -> None:
    """Say that an installation lacks a model that it should have."""
    if source in EXPECTED:
        raise UserError(
            f"`{source}` ships with didi, but is not in {root()}: install didi again, or give a "
            "folder or a Hugging Face id."
        )
