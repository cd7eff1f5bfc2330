"""From one layout to another: `didi convert`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from didi_instruct.config.parse import nearest
from didi_instruct.errors import UserError
from didi_instruct.hub import publish
from didi_instruct.hub.card_numbers import read_numbers
from didi_instruct.hub.esm import copy_esm
from didi_instruct.hub.private import publishable
from didi_instruct.hub.sources import (
    DidiFolder,
    LoadOptions,
    MaskedLMFolder,
    Source,
    find_source,
    shipped_name,
)
from didi_instruct.models.checkpoint import LoadedModel, read_manifest
from didi_instruct.models.foreign.folders import refuse_full
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.foreign.writing import write_foreign
from didi_instruct.models.masked_lm_writing import save_masked_lm
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.quantised import Storage, check_storage
from didi_instruct.models.tensor_files import watching

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
    storage: str | None = None,
    license: str | None = None,
    numbers: str | Path | None = None,
    about: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model of any SOURCE to the folder `dest`, number by number the same.

    What a format cannot hold is refused before anything is written. `discriminator=False` leaves
    one out; `progress` sees bytes written, of how many. Our own format alone knows a `storage` in
    fewer bytes (bfloat16, int8: what is written is then near, not the same), and a card with a
    `license`, the `numbers` of an evaluation (a file of `didi eval --json`) and words `about` it.
    """
    folder = _resolved(Path(dest))
    if to not in get_args(Format):
        raise UserError(f"`{to}` is not a format.{nearest(to, get_args(Format))}")
    _refuse_ours(to, storage=storage, license=license, numbers=numbers, about=about)
    stored = None if storage is None else check_storage(storage)
    told = None if numbers is None else read_numbers(Path(numbers))
    refuse_full(folder)
    options = LoadOptions(weights=weights, family=family, tokenizer=tokenizer)
    origin = find_source(source)
    _refuse(origin, to)
    with watching(progress):
        if to == "esm" and isinstance(origin, DidiFolder):
            loaded = origin.load(LoadOptions())
            _refuse_discriminator(loaded, to, discriminator)
            return _write_masked_lm(loaded, source, folder)
        if to == "esm":
            options.refuse_choices(origin.name)
            if tokenizer is not None:
                raise UserError(f"{origin.name} has its own tokenizer: leave out `tokenizer`.")
            return copy_esm(origin.path, folder)
        loaded = origin.load(options)
        if to == "didi":
            critic = loaded.discriminator if discriminator else None
            _write_ours(replace(loaded, discriminator=critic), folder, license, stored, told, about)
            return folder
        _refuse_discriminator(loaded, to, discriminator)
        return write_foreign(loaded, folder, to, discriminator)


def _resolved(folder: Path) -> Path:
    """Return the folder itself: `.` has no name, and a link is not what it leads to."""
    try:
        return folder.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} leads nowhere ({error}): choose another folder.") from error


def _refuse(origin: Source, to: str) -> None:
    """Refuse by names alone, before any weights are read."""
    if isinstance(origin, MaskedLMFolder) and to not in ("esm", "didi"):
        raise UserError(
            f"{origin.name} is a masked LM of `transformers`, which `{to}` cannot hold: it loads "
            "as it is; an ESM-2 model can be copied with --to esm."
        )
    ours = isinstance(origin, DidiFolder) and read_manifest(origin.path).network is not None
    if not isinstance(origin, MaskedLMFolder) and not ours and to == "esm":
        raise UserError(
            f"{origin.name} is a DiT, and `esm` holds ESM-2 models alone: use one of the others "
            f"({', '.join(f for f in get_args(Format) if f != 'esm')})."
        )


def _write_masked_lm(loaded: LoadedModel, source: str | Path, folder: Path) -> Path:
    """Write a masked LM that was saved in our layout as `transformers` has it."""
    assert isinstance(loaded.model, MaskedLM)
    kind = loaded.model.record.settings["model_type"]
    if kind != "esm":
        raise UserError(f"{source} is `{kind}`, and `esm` holds ESM-2 models alone.")
    if loaded.tokenizer is None:
        raise UserError(f"{source} has no tokenizer, which the layout of transformers needs.")
    return save_masked_lm(loaded.model, loaded.tokenizer, folder)


def _refuse_discriminator(loaded: LoadedModel, to: str, wanted: bool) -> None:
    if wanted and loaded.discriminator is not None and to != "didi-instruct":
        roomy = "didi" if to == "esm" else "didi-instruct"
        raise UserError(
            f"`{to}` has no place for the discriminator: leave it out with --no-discriminator "
            f"(in Python, discriminator=False), or use `{roomy}`."
        )


def _refuse_ours(to: str, **settings: object) -> None:
    """Refuse for other formats what only our layout has."""
    for name, value in settings.items():
        if value is not None and to != "didi":
            raise UserError(f"`{to}` has no {name}: leave it out, or write --to didi.")


def _write_ours(
    model: LoadedModel,
    folder: Path,
    license: str | None,
    storage: Storage | None,
    numbers: Mapping[str, Any] | None,
    about: str | None,
) -> None:
    """Write our layout; what goes into the package is published, and says its name there."""
    name, provenance = shipped_name(folder), None
    if name is not None:
        provenance = publishable(model.provenance)
    name = name or str(folder)
    publish.save(model, folder, name, license, provenance, storage, numbers, about)
