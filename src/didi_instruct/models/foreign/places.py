"""Find the parts of a foreign checkpoint in a folder or beside a file."""

from dataclasses import dataclass
from pathlib import Path

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import DISCRIMINATOR, MODEL, is_ours, read_object
from didi_instruct.models.tensor_files import shown

SUFFIXES = (".safetensors", ".ckpt", ".bin", ".pt", ".pth")
USUAL = (MODEL, "pytorch_model.bin")


@dataclass(frozen=True)
class Place:
    """The files of one checkpoint."""

    model: Path
    discriminator: Path | None
    config_folder: Path | None
    tokenizer_folder: Path | None


def locate(path: Path) -> Place:
    """Find the parts of a checkpoint, given as its folder or as the file of its weights."""
    if path.is_dir():
        folder, model = path, _single_file(path)
    elif path.is_file():
        folder, model = path.parent, path
    else:
        raise UserError(f"{path}: no such checkpoint file or folder.")
    beside = folder / DISCRIMINATOR
    together = model.name in USUAL or path.is_dir()
    names = ("tokenizer.json",), ("vocab.json", "merges.txt")
    has_tokenizer = any(all((folder / n).is_file() for n in files) for files in names)
    return Place(
        model=model,
        discriminator=beside if together and model != beside and beside.is_file() else None,
        config_folder=None if path.is_file() and is_ours(folder) else folder,
        tokenizer_folder=folder if has_tokenizer else None,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a folder; safetensors are preferred."""
    for name in USUAL:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_object(index).get("weight_map")
            files = {Path(str(n)).name for n in shards.values()} if isinstance(shards, dict) else ()
            if not files:
                raise UserError(f"{index} does not list files of weights: fetch it again.")
            return [folder / file for file in sorted(files)]
    others = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.name != DISCRIMINATOR)
    if len(others) != 1:
        several = ", ".join(shown(path.name) for path in others[:3]) or "none"
        raise UserError(
            f"{folder} should hold {' or '.join(USUAL)}, or one other file of weights "
            f"({' '.join(SUFFIXES)}), but has {several}: leave one there, or give the file itself."
        )
    return others


def _single_file(folder: Path) -> Path:
    whole = [folder / name for name in USUAL if (folder / name).is_file()]
    first, *more = whole[:1] or weight_files(folder)
    if more:
        raise UserError(f"{folder}: its weights are in several files: join them to {MODEL}.")
    return first
