"""Denoisers of a network on a device: the same laws, laid out for it."""

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_few(there: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """Value of a key, made if missing; beyond `most`, the least recently used one goes."""
    if key not in there:
        if len(there) >= most:
            del there[next(iter(there))]
        there[key] = make()
    there[key] = there.pop(key)
    return there[key]
