"""The result of an evaluation of samples."""

from dataclasses import dataclass, field

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.samples import SampleSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Numbers of samples, row by row, and of what they are compared with."""

    rows: list[Row]
    baseline: list[Row] = field(default_factory=list)
    """Rows of the model that the others are compared with."""
    reference: Row = field(default_factory=dict)
    """The same metrics of the reference text; empty without one."""
    controls: tuple[Row, ...] = ()
    """Rows that no sampler wrote: real chains, shuffled ones, those of a file."""
    judge: str | None = None
    samples: tuple[SampleSet, ...] = ()
    """Those behind the rows, the baseline's last."""
