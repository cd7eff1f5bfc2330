"""What of a model's history is anybody's business: no folders of a disk, no keys to an account."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

PUBLIC = (
    "recipe", "reproduces", "step", "teacher", "quick_evaluation", "held_out", "finetuned_from",
    "foreign", "padding", "didi_instruct", "torch", "versions",
)  # fmt: skip
"""Keys of the provenance that are published: settings, numbers, fingerprints and versions."""

_PART = r"[^\s/\\'\"`|,;:<>()\[\]{}=]"
_END = rf"(?:{_PART}+[/\\])*{_PART}*"
_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{6,}")
_PRIVATE = re.compile(
    r"(?P<address>\b(?!file:)[A-Za-z][\w+.-]{,20}://[^\s]+)"
    rf"|(?P<path>\bfile:/*{_END}"  # a path as an address
    rf"|(?<!\w)[A-Za-z]:[/\\]{_END}"  # of Windows
    rf"|\\\\{_END}"  # of a network
    rf"|(?<!{_PART})(?<![/\\])(?:{_PART}+[/\\])*(?<![\w.])\.\.[/\\]{_END}"  # upwards
    rf"|(?<![\w.~])(?:~[\w.-]*|\$\{{?HOME\}}?)?/+(?={_PART}){_END})"
)
_STARTS = re.compile(r"[/~\\]|[A-Za-z]:[/\\]")


def without_paths(value: Any) -> Any:
    """Shorten paths to their last part, wherever they stand, and leave out tokens of the hub.

    Where a disk keeps things is nobody's business. Names on the hub (`owner/name`) stay.
    """
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if _STARTS.match(value):  # a path as a whole, with spaces in it or not
        value = _name(value)
    return _PRIVATE.sub(lambda m: m["address"] or _name(m["path"]), _TOKEN.sub("hf_…", value))


def publishable(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a provenance is published: known keys alone, without paths and tokens."""
    told = {key: provenance[key] for key in PUBLIC if key in provenance}
    recipe, foreign = told.get("recipe"), told.get("foreign")
    if isinstance(recipe, Mapping) and isinstance(recipe.get("data"), Mapping):
        told["recipe"] = {**recipe, "data": _without_folder(recipe["data"])}
    if isinstance(foreign, Mapping) and "hub" not in foreign:
        told["foreign"] = _without_folder(foreign)
    if isinstance(base := told.get("finetuned_from"), Mapping):
        told["finetuned_from"] = _without_folder(base)
        if isinstance(before := base.get("provenance"), Mapping):
            told["finetuned_from"]["provenance"] = publishable(before)
    public: dict[str, Any] = without_paths(told)
    return public


def _without_folder(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the folder off a `source`; `hf:owner/name` and addresses say it best as they are."""
    source = origin.get("source")
    if not isinstance(source, str) or re.match(r"\w+:", source):
        return dict(origin)
    return {**origin, "source": _name(source)}


def _name(path: str) -> str:
    return PurePath(path.replace("\\", "/")).name.removeprefix("..") or "…"
