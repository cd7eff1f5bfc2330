"""Where two results that are JSON differ, and how far. Nothing of the package is imported."""

import math
from collections.abc import Callable, Iterator
from typing import Any


def differences(
    golden: Any, found: Any, tolerance: Callable[[str], tuple[float, float]], path: str = ""
) -> Iterator[tuple[str, Any, Any, float]]:
    """Where two nested results differ: path, both values, and how far apart.

    `tolerance` gives for a path the largest relative difference, and the size below which a number
    counts as that size. Other than numbers are equal or not, and infinitely apart.
    """
    if isinstance(golden, dict) and isinstance(found, dict):
        for name in sorted({*golden, *found}):
            there = f"{path}.{name}" if path else name
            if name not in golden or name not in found:
                yield there, golden.get(name), found.get(name), math.inf
            else:
                yield from differences(golden[name], found[name], tolerance, there)
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for n, (one, other) in enumerate(zip(golden, found, strict=True)):
            yield from differences(one, other, tolerance, f"{path}[{n}]")
    elif _is_number(golden) and _is_number(found):
        most, size = tolerance(path)
        apart = distance(golden, found, size)
        if apart > most:
            yield path, golden, found, apart
    elif golden != found or type(golden) is not type(found):
        yield path, golden, found, math.inf


def distance(one: float, other: float, size: float) -> float:
    """Difference of two numbers relative to the larger one, or to `size` where that is more."""
    if one == other:
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), size)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
