"""What a report is made of, before anything is chosen or said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.samples import REAL, SampleSet
from didi_instruct.evaluation.table import unsampled


def of_length(row: Row) -> str:
    """Length of a row among several, in words; empty for one that stands alone."""
    if not row.get("lengths"):
        return ""
    return f", length {row['length']}" if row.get("length") else ", mean over lengths"


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Everything a report is made of."""

    title: str
    rows: Sequence[Row]
    baseline: Sequence[Row] = ()
    """Of the model that `rows` are compared with."""
    reference: Row = field(default_factory=dict)
    """The same measures of real text; empty without one."""
    controls: Sequence[Row] = ()
    """Rows that no sampler wrote: real chains, shuffled ones, those of a file."""
    judge: str | None = None
    samples: Sequence[SampleSet] = ()
    """Those behind the rows, for texts side by side."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    """What makes the report again."""

    @property
    def real(self) -> Row:
        """The reference text, without the settings of a sampler."""
        return unsampled(self.reference)

    @property
    def unwritten(self) -> list[tuple[str, Row]]:
        """Rows below a table with their names: controls, and the reference text."""
        rows = [*map(unsampled, self.controls), *([self.real] if self.reference else [])]
        return [(f"{row.get('model', '')}{of_length(row)}", row) for row in rows]

    def real_like(self, row: Row) -> Row:
        """Real text to compare a row with: real chains of its length, or the reference."""
        alike = [c for c in self.controls if c["model"] == REAL and c["length"] == row["length"]]
        return alike[0] if alike else self.real

    def everything(self) -> list[Row]:
        """All rows that were measured."""
        rows = [*self.rows, *self.baseline, *map(unsampled, self.controls)]
        return [*rows, *([self.real] if self.reference else [])]
