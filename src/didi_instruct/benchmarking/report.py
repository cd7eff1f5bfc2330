"""Timings as rows, as JSON and as a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from didi_instruct.benchmarking.timing import Case, Timing
from didi_instruct.data.files import write_atomic

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bench:
    """What was timed, on what."""

    subject: str
    """The model."""
    rows: list[dict[str, Any]]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Device, precision, versions: what the numbers depend on."""

    def write(self, path: Path) -> None:
        """Write JSON."""
        value = {"model": self.subject, "rows": self.rows, **self.about}
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def make_rows(
    cases: Sequence[Case], timings: Sequence[Timing], **facts: Any
) -> list[dict[str, Any]]:
    """One row per case; those that did not run have null and a note."""
    rows = []
    for case, timing in zip(cases, timings, strict=True):
        median, steps = timing.median, timing.steps or case.steps
        tokens = case.batch * case.length * case.batches
        rows.append(
            {
                "name": case.name,
                "batch": case.batch,
                "length": case.length,
                "steps": steps,
                **facts,
                "seconds_median": median,
                "seconds_min": min(timing.seconds, default=None),
                "seconds_max": max(timing.seconds, default=None),
                "tokens_per_second": None if median is None else tokens / median,
                "ms_per_step": None if median is None else 1e3 * median / steps,
                "gpu_busy": None if not median or timing.busy is None else timing.busy / median,
                "peak_memory_gib": None if timing.peak is None else timing.peak / GIB,
                "note": timing.failure or case.note,
            }
        )
    return add_ratios(rows)


def add_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each row how many times longer it took than the first."""
    first = rows[0]["seconds_median"] if rows else None
    for row in rows:
        seconds = row["seconds_median"]
        row["ratio_to_first"] = None if first is None or seconds is None else seconds / first
    return rows


def table(bench: Bench) -> "Table":
    """Rows for a terminal, with the spread of the seconds."""
    from rich.table import Table

    titles = ["", "batch", "length", "steps"]
    extra = [name for name in ("vocabulary",) if any(name in row for row in bench.rows)]
    titles += [*extra, "seconds", "min..max", "tokens/s", "ms/step", "GiB", "ratio"]
    busy = any(row["gpu_busy"] is not None for row in bench.rows)
    titles += ["busy"] * busy
    shown = Table(*titles, box=None, pad_edge=False)
    for number, column in enumerate(shown.columns):
        column.justify, column.no_wrap = "right" if number else "left", True
    for row in bench.rows:
        shape = [str(row[name]) for name in ("batch", "length", "steps", *extra)]
        if row["seconds_median"] is None:
            shown.add_row(row["name"], *shape, "-", *["-"] * (5 + busy))
            continue
        shown.add_row(
            row["name"],
            *shape,
            f"{row['seconds_median']:.4f}",
            f"{row['seconds_min']:.4f}..{row['seconds_max']:.4f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ms_per_step']:.2f}",
            "-" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.2f}",
            "-" if row["ratio_to_first"] is None else f"{row['ratio_to_first']:.2f}",
            *[f"{row['gpu_busy']:.0%}" if row["gpu_busy"] is not None else "-"] * busy,
        )
    return shown


def notes(bench: Bench) -> list[str]:
    """Lines about rows that did not run, or that differ from the others; each once."""
    lines = []
    for row in bench.rows:
        if row["note"]:
            verb = " did not run" if row["seconds_median"] is None else ""
            lines.append(f"{row['name']}{verb}: {row['note']}")
    return list(dict.fromkeys(lines))
