"""`didi eval` of samples: drawn, measured, shown."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from didi_instruct.cli.likelihood import default_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from didi_instruct.data.readers import ReadOptions
    from didi_instruct.evaluation.evaluate import Evaluation


def quality(
    sources: "Sequence[str]",
    plan: Any,
    metrics: "Sequence[str]",
    judge: str | None,
    judge_settings: dict[str, Any],
    reference: str | None,
    against: str | None,
    samples: "Sequence[Path]",
    out: Path | None,
    *,
    lengths: "Sequence[int | None]",
    reading: "ReadOptions",
    tokenizer: str | None,
    ar_start: str | None,
    folding: str | None,
    json_file: Path | None,
    device: str | None,
    dtype: str | None,
) -> None:
    """Sample quality, as a table and as JSON."""
    from didi_instruct.api.lengths import evaluate_lengths
    from didi_instruct.api.preflight import check_models, check_needs
    from didi_instruct.api.yardstick import open_folding
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.evaluation.judges import open_judge
    from didi_instruct.hub.sources import find_shipped

    folder = out or default_folder([*sources, *map(str, samples)], against)
    models = []
    for length in lengths:
        asked = replace(plan, length=length)
        models += check_models(sources, against, asked, reference, reading, metrics, tokenizer)
    opened, predictor = None, None
    if judge is not None:
        source = find_shipped(judge) or judge
        opened = open_judge(source, device=device, name=judge, **judge_settings)
    check_needs(metrics, plan, opened, models)
    if folding is not None:
        predictor = open_folding(folding, folder / "folds", device)
    with ProgressBar() as bar:
        found = evaluate_lengths(
            sources,
            plan,
            metrics,
            lengths,
            out=folder,
            judge=opened,
            reference=reference,
            reading=reading,
            against=against,
            samples=samples,
            tokenizer=tokenizer,
            ar_start=ar_start,
            folding=predictor,
            device=device,
            dtype=dtype,
            progress=lambda stage, done, total: bar.update(
                stage, done, total, "rows" if stage.startswith("Drawing") else "texts"
            ),
        )
    name = ", ".join(sources) or ", ".join(map(str, samples))
    _write(found, name, folder, json_file)


def _write(found: "Evaluation", name: str, folder: Path, json_file: Path | None) -> None:
    """Write JSON and report, and say where they are."""
    import shutil

    from rich.console import Console

    from didi_instruct.api.evaluate import Report as Numbers
    from didi_instruct.evaluation.provenance import provenance
    from didi_instruct.evaluation.report import Report, short_names

    if json_file is not None:
        rows = [*found.rows, *found.controls]
        Numbers(name, found.judge, rows, found.reference, found.baseline).write(json_file)
    replaced = " (in place of an earlier one)" if (folder / "report.html").exists() else ""
    names = short_names([row["model"] for row in found.rows]).values()
    command = shlex.join(["didi", *sys.argv[1:]])
    report = Report.build(
        found, f"Samples of {', '.join(names)}", provenance=provenance(), command=command
    )
    page, _ = report.write(folder)
    console = Console(width=shutil.get_terminal_size((120, 24)).columns)
    console.print(report.to_terminal(console.width))
    counts = sorted({row["num_samples"] for row in found.rows})
    many = "" if counts == [1] else "s"
    typer.echo(f"{_span(counts)} sample{many} per row; samples and numbers in {folder}")
    typer.echo(f"Report: {page}{replaced}")
    if json_file is not None:
        typer.echo(f"Wrote {json_file}")


def _span(numbers: "Sequence[int]") -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
