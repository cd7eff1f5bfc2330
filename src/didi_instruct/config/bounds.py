"""Bounds that settings of many sections keep."""

import math
from collections.abc import Iterable

from didi_instruct.errors import UserError


def at_least(section: str, settings: object, least: float, names: Iterable[str]) -> None:
    """Refuse settings of a section below `least`, or endless ones."""
    for name in names:
        value = getattr(settings, name)
        if not least <= value < math.inf:
            raise UserError(f"{section}.{name} is {value}: use {least:g} or more.")


def positive(section: str, settings: object, names: Iterable[str]) -> None:
    """Refuse settings of a section that are not finite numbers above 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise UserError(f"{section}.{name} is {value}: use a finite number above 0.")
