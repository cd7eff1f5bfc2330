"""What of the paper can be made again: one item for each table and figure.

An item says which jobs it needs at a scale and how their results become a table. It trains and
measures nothing itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.config.schema import nearest
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from didi_instruct.reproduce.jobs import Job
    from didi_instruct.reproduce.scale import Scale
    from didi_instruct.reproduce.tables import Table

Results = Mapping[str, Any]
"""What each finished job returned, by the job's key; a failed one is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A table or a figure of the paper."""

    name: str
    title: str
    where: str
    """In the paper; empty for what it does not have."""
    jobs: Callable[["Scale"], Sequence["Job"]]
    """Jobs whose results the table needs; theirs follow from them."""
    table: Callable[["Scale", Results], "Table"]
    figure: Callable[["Scale", "Table", Results, Path], None] | None = None
    """Draws a PNG."""


def find_item(name: str, items: Mapping[str, Item]) -> Item:
    """The item of that name."""
    if name not in items:
        raise UserError(f"`{name}` is not an item.{nearest(name, list(items))}")
    return items[name]
