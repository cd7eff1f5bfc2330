"""Remove local paths, tokens and everything else that is nobody's business before publishing."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

PUBLIC = (
    "recipe", "reproduces", "step", "teacher", "quick_evaluation", "held_out", "finetuned_from",
    "foreign", "padding", "didi_instruct", "torch", "versions",
)  # fmt: skip
"""Keys of the provenance that are published: settings, numbers, fingerprints and versions."""
_PUBLIC_ORIGIN = ("source", "hub", "layout", "weights", "notes", "tokenizer")
_PUBLIC_BASE = ("source", "sha256", "provenance")

_PART = r"[^\s/\\'\"`|,;:<>()\[\]{}=]"
_END = rf"(?:{_PART}+[/\\])*{_PART}*"
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:(hf_)[A-Za-z0-9]{6,}"
    r"|(gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|eyJ)[\w.-]{16,})"
)
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_PRIVATE = re.compile(
    r"(?P<address>\b(?!file:)[A-Za-z][\w+.-]{,20}://[^\s]+)"
    rf"|(?P<path>\bfile:/*{_END}"  # a path as an address
    rf"|(?<!\w)[A-Za-z]:[/\\]{_END}"  # of Windows
    rf"|\\\\{_END}"  # of a network
    rf"|(?<!{_PART})(?<![/\\])(?:{_PART}+[/\\])*(?<![\w.])\.\.[/\\]{_END}"  # upwards
    rf"|(?<![\w.~])(?:~[\w.-]*|\$\{{?HOME\}}?)?/+(?={_PART}){_END})"
)
_STARTS = re.compile(r"[/~\\]|[A-Za-z]:[/\\]")
_HOMES = ("home", "Users", "users")


def without_paths(value: Any) -> Any:
    """Shorten paths to their last part, wherever they stand, and cut tokens and logins.

    Names on the hub (`owner/name`) stay; a home directory, whose last part is a user, does not.
    """
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if _STARTS.match(value):  # a path as a whole, with spaces in it or not
        value = _name(value)
    value = _LOGIN.sub("", _TOKEN.sub(r"\1\2…", value))
    return _PRIVATE.sub(lambda m: m["address"] or _name(m["path"]), value)


def publishable(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public part of a provenance: known keys alone, without paths and tokens."""
    told = {key: provenance[key] for key in PUBLIC if key in provenance}
    recipe, foreign, base = (told.get(key) for key in ("recipe", "foreign", "finetuned_from"))
    if isinstance(recipe, Mapping) and isinstance(recipe.get("data"), Mapping):
        told["recipe"] = {**recipe, "data": _without_folder(recipe["data"])}
    if isinstance(foreign, Mapping):
        origin = {key: foreign[key] for key in _PUBLIC_ORIGIN if key in foreign}
        told["foreign"] = origin if "hub" in foreign else _without_folder(origin)
    if isinstance(base, Mapping):
        told["finetuned_from"] = _without_folder({k: base[k] for k in _PUBLIC_BASE if k in base})
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
    parts = PurePath(path.replace("\\", "/")).parts
    if len(parts) > 1 and parts[-2] in _HOMES:
        return "…"
    return (parts[-1] if parts else "").strip("/").removeprefix("..") or "…"
