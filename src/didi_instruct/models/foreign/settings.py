"""config.json of a foreign model: the few settings that matter here, under their various names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, FORMAT, read_json
from didi_instruct.models.tensor_files import shown_value

_FIELDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "hidden": (int, ("hidden_dim", "model.hidden_size")),
    "layers": (int, ("n_blocks", "model.n_blocks")),
    "heads": (int, ("n_heads", "model.n_heads")),
    "cond_dim": (int, ("cond_dim", "model.cond_dim")),
    "vocab_size": (int, ("vocab_size",)),
    "length": (int, ("model_length", "model.length")),
    "dropout": (float, ("dropout", "model.dropout")),
    "time_conditioning": (bool, ("time_conditioning", "algo.time_conditioning")),
    "causal": (bool, ("causal", "algo.causal_attention", "model.causal")),
    "model_type": (str, ("model_type", "algo.name", "graph.type")),
    "padding_id": (int, ("pad_token_id",)),
}
"""Our name, type, and theirs: flat as on the hub, nested as in Hydra configurations (SDTT)."""


_ABSURD = 1 << 63
"""No setting is a number of this size, and a message should not be one."""
_LARGEST = 1 << 40
"""Of a size of a network."""


@dataclass(frozen=True)
class Settings:
    """Settings from config.json; None where it is silent, or where there is none."""

    path: Path | None = None
    is_nested: bool = False
    """Whether it is a whole Hydra configuration, with the network's shape under `model`."""
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    cond_dim: int | None = None
    vocab_size: int | None = None
    length: int | None = None
    dropout: float | None = None
    time_conditioning: bool | None = None
    causal: bool | None = None
    model_type: str | None = None
    padding_id: int | None = None


def read_settings(folder: Path | None) -> Settings:
    """Read config.json of a folder; one that has none says nothing."""
    if folder is None or not (folder / CONFIG).is_file():
        return Settings()
    path = folder / CONFIG
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a group of settings: fetch it again.")
    if content.get("format") == FORMAT:
        raise UserError(f"{folder} was written by didi and is no foreign checkpoint: load it.")
    found: dict[str, Any] = {}
    for name, (kind, theirs) in _FIELDS.items():
        for place in theirs:
            value = _look_up(content, place)
            if value is not None:
                found[name] = _typed(path, place, value, kind)
                break
    return Settings(path, isinstance(content.get("model"), dict), **found)


def whole_number(path: Path, settings: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """Return the whole number that config.json has under one of several names."""
    for name in names:
        value = settings.get(name)
        if type(value) is int and least <= value <= _LARGEST:
            return value
    raise UserError(
        f"{path}: `{names[0]}` is {shown_value(settings.get(names[0]))}, and has to be a whole "
        f"number of {least} or more. Fetch it again."
    )


def positive_number(path: Path, settings: Mapping[str, Any], name: str) -> float:
    """Return the finite number above 0 that config.json has under a name."""
    value: Any = settings.get(name)
    if type(value) in (int, float) and 0 < value <= _LARGEST:
        return float(value)
    raise UserError(
        f"{path}: `{name}` is {shown_value(value)}, and has to be a number above 0. Fetch it again."
    )


def _look_up(content: dict[str, Any], place: str) -> Any:
    value: Any = content
    for part in place.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _typed(path: Path, place: str, value: Any, kind: type) -> Any:
    if type(value) is int and abs(value) >= _ABSURD:
        raise UserError(f"{path}: `{place}` is {shown_value(value)}, which is not sensible.")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"{path}: `{place}` is {shown_value(value)}, not of type {kind.__name__}.")
    return value
