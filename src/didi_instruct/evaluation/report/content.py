"""What a report is made of, before anything is chosen or said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.table import unsampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Everything a report is made of."""

    title: str
    rows: Sequence[Row]
    baseline: Sequence[Row] = ()
    """Of the model that `rows` are compared with."""
    reference: Row = field(default_factory=dict)
    """The same measures of real text; empty without one."""
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

    def everything(self) -> list[Row]:
        """All rows that were measured."""
        return [*self.rows, *self.baseline, *([self.real] if self.reference else [])]
