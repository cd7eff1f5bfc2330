"""Columns of an evaluation: names, numbers, intervals, meaning; the same wherever it is shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a row."""

    title: str
    field: str
    form: str
    meaning: str
    """One plain sentence or two: what it is, and which way is better."""
    better: Better | None = None
    """Which way is better whatever the other columns say; None where no way is."""

    def value(self, row: Row) -> str:
        """The number of a row as it is shown; a dash where there is none."""
        value = row.get(self.field)
        return "–" if value is None else self.form.format(value)

    def interval(self, row: Row) -> str:
        """Its 95% interval as it is shown; empty where there is none."""
        ends = interval(row, self.field)
        return "[{}, {}]".format(*map(self.form.format, ends)) if ends else ""

    def note(self, row: Row) -> str:
        """Why there is no number, or what to know about it."""
        return row.get(f"{self.field}_note") or ""


BESIDE_VARIETY = (
    "on its own it can reward texts that are slightly too much alike: read it beside the measures "
    "of variety (entropy, 4-grams, Self-BLEU; latent entropy where the language is known)."
)
PASSES = Column(
    "passes", "passes", "{:.1f}",
    "Forward passes that ran per text; a backward pass counts as two.",
)  # fmt: skip
"""Shown before the numbers of metrics."""
MEAN_LENGTH = Column(
    "length", "mean_length", "{:.1f}",
    "Tokens of a text before its end, mean over texts. Neither high nor low is good: it should "
    "match that of real text.",
)  # fmt: skip
"""Shown only where texts end before their window."""
INEXACT_PATH_KL = (
    "The judge's cross-entropy of the texts minus the entropy of the sampler's draws, in nats per "
    "text. This judge knows the likelihood of a text only up to a bound, or in other tokens: "
    "differences between rows count, the value itself does not and may be negative. Lower is "
    "better, but " + BESIDE_VARIETY
)
NOT_SWEPT = (
    "Here the baseline has only its plain setting and may do better at another: --frontier tries "
    "more."
)


def ends_early(row: Row) -> bool:
    """Return True if texts of a row end before their window."""
    mean, length = row.get("mean_length"), row.get("length")
    return mean is not None and length is not None and mean != length


def meaning(column: Column, rows: Sequence[Row]) -> str:
    """Explain a column as it is in these rows."""
    if column.field == "path_kl" and any(row.get("path_kl_exact") is False for row in rows):
        return INEXACT_PATH_KL
    swept = any(row.get(name) not in (None, 1) for row in rows for name in ("temperature", "top_p"))
    if column.field in ("path_kl_vs_baseline", "gap_closed") and not swept:
        return f"{column.meaning} {NOT_SWEPT}"
    return column.meaning


def interval(row: Row, field: str) -> tuple[float, float] | None:
    """95% interval of a value; None without a finite one."""
    ends = row.get(f"{field}_ci95")
    if row.get(field) is None or ends is None or not all(map(math.isfinite, ends)):
        return None
    return float(ends[0]), float(ends[1])
