"""From one layout to another: `didi convert`."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from didi_instruct.api.esm import copy_esm
from didi_instruct.api.model import Model
from didi_instruct.api.open import Origin, check_choices, find, open_source, refuse_choices
from didi_instruct.config.parse import nearest
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.foreign.folders import refuse_full
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.models.tensors import watching

Format = Literal["didi", "mdlm-hub", "didi-instruct", "duo-hub", "sdtt-hub", "esm"]
"""What can be written."""


def convert(
    source: str | Path,
    dest: str | Path,
    to: Format,
    *,
    weights: WeightSet = "ema",
    family: Family | None = None,
    tokenizer: str | Path | None = None,
    discriminator: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model of any SOURCE to the folder `dest`, number by number the same.

    What a format cannot hold is refused before anything is written. `discriminator=False` leaves
    one out; `progress` sees bytes written, of how many.
    """
    folder = _resolved(Path(dest))
    if to not in get_args(Format):
        raise UserError(f"`{to}` is not a format.{nearest(to, get_args(Format))}")
    refuse_full(folder)
    check_choices(weights, family)
    origin = find(source)
    _refuse(origin, to)
    with watching(progress):
        if to == "esm":
            refuse_choices(origin, weights, family)
            if tokenizer is not None:
                raise UserError(f"{origin.name} has its own tokenizer: leave out `tokenizer`.")
            return copy_esm(origin.path, folder)
        loaded = open_source(source, weights=weights, family=family, tokenizer=tokenizer)
        if to == "didi":
            return _write_ours(loaded, folder, discriminator)
        _refuse_discriminator(loaded, to, discriminator)
        return write_foreign(loaded, folder, to, discriminator)


def _resolved(folder: Path) -> Path:
    """Return the folder itself: `.` has no name, and a link is not what it leads to."""
    try:
        return folder.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} leads nowhere ({error}): choose another folder.") from error


def _refuse(origin: Origin, to: str) -> None:
    """Refuse by names alone, before any weights are read."""
    if origin.form == "masked-lm" and to != "esm":
        raise UserError(
            f"{origin.name} is a masked LM of `transformers`, which `{to}` cannot hold: it loads "
            "as it is; an ESM-2 model can be copied with --to esm."
        )
    if origin.form != "masked-lm" and to == "esm":
        raise UserError(
            f"{origin.name} is a DiT, and `esm` holds ESM-2 models alone: use one of the others "
            f"({', '.join(f for f in get_args(Format) if f != 'esm')})."
        )


def _refuse_discriminator(loaded: LoadedModel, to: str, wanted: bool) -> None:
    if wanted and loaded.discriminator is not None and to != "didi-instruct":
        raise UserError(
            f"`{to}` has no place for the discriminator: leave it out with --no-discriminator "
            "(in Python, discriminator=False), or use `didi-instruct`."
        )


def _write_ours(loaded: LoadedModel, folder: Path, discriminator: bool) -> Path:
    critic = loaded.discriminator if discriminator else None
    Model(loaded.model, loaded.config, loaded.tokenizer, critic, loaded.provenance).save(folder)
    return folder
