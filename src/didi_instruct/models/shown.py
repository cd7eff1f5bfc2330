"""Words of foreign files in our own lines: they are anybody's, so they may hold anything."""

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

LONGEST = 80
"""Characters of a name or a value that are shown."""

LISTED = 3
"""Tensors named in an error before the rest is only counted."""


def shown(text: str, most: int = LONGEST) -> str:
    """Return one printable line: no line breaks, escape sequences or halves of characters."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shown_value(value: Any, most: int = LONGEST) -> str:
    """Return a value of a foreign file as Python writes it, on one printable line."""
    try:
        return shown(repr(value), most)
    except (ValueError, RecursionError):  # a number of too many digits, a list without a bottom
        return f"a {type(value).__name__} that is too large to show"


def first_few(names: Collection[str], show: Callable[[str], str] = shown) -> str:
    """Name a few of many, and count the rest."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(show, islice(names, LISTED))) + more
