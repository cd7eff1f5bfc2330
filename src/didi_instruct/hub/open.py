"""SOURCE, the one way to name a model: from what people write to files, and to networks."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

import torch

from didi_instruct.config.parse import nearest
from didi_instruct.data.files import sha256_file
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub.shipped import find_shipped, refuse_missing, shipped
from didi_instruct.models.causal_lm import is_causal
from didi_instruct.models.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER,
    LoadedModel,
    is_ours,
    load_model,
    read_manifest,
)
from didi_instruct.models.foreign.hub import fetch
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.places import SUFFIXES, locate, weight_files
from didi_instruct.models.foreign.reading import load_foreign
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.masked_lm import (
    load_masked_lm,
    open_weights,
    recognise_masked_lm,
)

Form = Literal["didi", "foreign", "masked-lm"]
"""Written by didi; a public checkpoint of the DiT family; a masked LM of `transformers`."""

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class Origin:
    """Where a SOURCE leads."""

    name: str
    """As it was written."""
    path: Path
    """A folder, or a file of weights."""
    form: Form
    hub: str | None = None
    """Its name on the hub, if it was found there."""


def find(source: str | Path) -> Origin:
    """Say where a SOURCE leads, fetching it from the hub if that is where it is."""
    folder = find_shipped(source)
    if folder is not None:
        return Origin(str(source), folder, "didi")
    path = Path(source).expanduser()
    if path.exists():
        return _classify(str(source), path)
    path, hub = _elsewhere(str(source), isinstance(source, Path))
    return replace(_classify(str(source), path), hub=hub)


def open_source(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: WeightSet = "ema",
    family: Family | None = None,
    tokenizer: str | Path | None = None,
) -> LoadedModel:
    """Load the networks, tokenizer and provenance of any SOURCE.

    `weights` and `family` are for public checkpoints (`load_foreign`), `tokenizer` for those that
    bring none.
    """
    check_choices(weights, family)
    origin = find(source)
    loaded = _load(origin, device, dtype, weights, family)
    if origin.form != "didi":
        # A name on the hub means something elsewhere too; the cache's path does not.
        foreign = loaded.provenance.setdefault("foreign", {})
        foreign["source"] = origin.name
        if origin.hub is not None:
            foreign["hub"] = origin.hub
    if tokenizer is not None:
        _give_tokenizer(origin, loaded, tokenizer)
    return loaded


def _load(
    origin: Origin,
    device: torch.device | str,
    dtype: torch.dtype | None,
    weights: WeightSet,
    family: Family | None,
) -> LoadedModel:
    if origin.form == "foreign":
        refuse_causal(origin)
        return load_foreign(origin.path, device, dtype, weights, family)
    refuse_choices(origin, weights, family)
    if origin.form == "didi":
        return load_model(origin.path, device, dtype)
    return load_masked_lm(origin.path, device, dtype)


def _give_tokenizer(origin: Origin, loaded: LoadedModel, source: str | Path) -> None:
    """Add the tokenizer that a checkpoint was trained with and does not bring."""
    if loaded.tokenizer is not None:
        raise UserError(f"{origin.name} has its own tokenizer: leave out `tokenizer`.")
    tokenizer = Tokenizer.load(source)
    room = loaded.config.num_tokens
    if tokenizer.size > room:
        raise UserError(
            f"{origin.name} has {room} tokens, and the tokenizer `{source}` {tokenizer.size}: give "
            "the one that it was trained with."
        )
    loaded.tokenizer = tokenizer
    foreign = loaded.provenance.get("foreign")
    if isinstance(foreign, dict):
        foreign["tokenizer"] = str(source)
        foreign["notes"] = [n for n in foreign.get("notes", ()) if "no tokenizer" not in n]


def digests(source: str | Path) -> dict[str, str]:
    """SHA-256 of each file that a model consists of, by name: what its samples depend on."""
    origin = find(source)
    if origin.form == "didi":
        return {n: record.sha256 for n, record in read_manifest(origin.path).files.items()}
    return {path.name: sha256_file(path) for path in _files(origin)}


def fingerprint(source: str | Path) -> str:
    """Tell weights apart: their file's SHA-256, with what else decides how they are read.

    Of a folder of ours, the SHA-256 of its weights as config.json has it: nothing is read.
    """
    found = digests(source)
    if find(source).form == "didi":
        return found[MODEL]
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def check_choices(weights: str, family: str | None) -> None:
    """Refuse words that name no set of weights, or no family."""
    if weights not in get_args(WeightSet):
        raise UserError(f"weights is `{weights}`: use `ema` (averaged) or `raw`.")
    families = get_args(Family)
    if family is not None and family not in families:
        raise UserError(f"`{family}` is not a family of models.{nearest(family, families)}")


def refuse_choices(origin: Origin, weights: str, family: str | None) -> None:
    """Refuse to choose where there is no choice."""
    if weights != "ema":
        raise UserError(f"{origin.name} holds one set of weights: leave out `weights`.")
    if family is not None:
        raise UserError(f"{origin.name} says itself what it is: leave out `family`.")


def refuse_causal(origin: Origin) -> None:
    """Refuse a causal LM where a denoiser is asked for."""
    if is_causal(origin.path):
        raise UserError(
            f"{origin.name} is a causal LM, which reads from left to right: use it as --judge, or "
            f"make a denoiser of it with `didi finetune finetune-text --model {origin.name} --set "
            "bidirectional=true`."
        )


def _classify(name: str, path: Path) -> Origin:
    folder = path if path.is_dir() else path.parent
    # Weights that belong to a folder are told by the folder what they are.
    if is_ours(folder) and (path.is_dir() or path.name == MODEL):
        return Origin(name, folder, "didi")
    found = recognise_masked_lm(folder)
    if found and (path.is_dir() or path in weight_files(folder)):
        open_weights(found)
        return Origin(name, folder, "masked-lm")
    if path.is_dir() and not any(p.suffix in SUFFIXES for p in path.iterdir()):
        raise UserError(
            f"{name} holds no model: neither didi's {CONFIG} nor weights ({' '.join(SUFFIXES)}). "
            "Give the folder, or the file itself."
        )
    return Origin(name, path, "foreign")


def _elsewhere(source: str, is_path: bool) -> tuple[Path, str]:
    """Find what is no file or folder here: its folder, and its name on the hub."""
    if is_path or source.startswith((".", "/", "~")) or Path(source).suffix in SUFFIXES:
        raise UserError(f"{source}: no such file or folder.")
    refuse_missing(source)
    match = _HUB_ID.fullmatch(source)
    if match is None:
        raise UserError(
            f"`{source}` is no file or folder here, no model that ships with didi "
            f"({', '.join(shipped())}), and no Hugging Face id (owner/name or "
            "owner/name@revision): check the path."
        )
    try:
        return fetch(match[1], match[2]), match[1]
    except UserError as error:
        raise UserError(
            f"{source} is no file or folder here. As a Hugging Face id: {error}"
        ) from error


def _files(origin: Origin) -> Iterable[Path]:
    """Weights, settings and tokenizer of a model that is not ours."""
    if origin.form == "masked-lm" or is_causal(origin.path):
        others = (p for p in origin.path.iterdir() if p.suffix in (".json", ".txt"))
        return [*weight_files(origin.path), *sorted(others)]
    place = locate(origin.path)
    settings = [place.config_folder / CONFIG] if place.config_folder else []
    folder = place.tokenizer_folder
    words = [*TOKENIZER, "vocab.json", "merges.txt"] if folder else []
    files = [place.model, place.discriminator, *settings, *(folder / n for n in words if folder)]
    return [path for path in files if path is not None and path.is_file()]
