"""Where in a folder, or beside a file, the parts of a foreign checkpoint are."""

from dataclasses import dataclass
from pathlib import Path

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import DISCRIMINATOR, MODEL, is_ours

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
        folder, model = path, _weights(path)
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


def _weights(folder: Path) -> Path:
    for name in USUAL:
        if (folder / name).is_file():
            return folder / name
    for name in USUAL:
        if (folder / f"{name}.index.json").is_file():
            raise UserError(f"{folder}: its weights are in several files: join them to {MODEL}.")
    files = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.name != DISCRIMINATOR)
    if len(files) != 1:
        several = ", ".join(p.name for p in files[:3]) or "none"
        raise UserError(
            f"{folder} should hold one file of weights ({' '.join(SUFFIXES)}), but has {several}: "
            "give the file itself."
        )
    return files[0]
