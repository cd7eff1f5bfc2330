"""`didi eval`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from didi_instruct.errors import UserError

METRICS = ("nelbo",)


def command(
    source: Annotated[str, typer.Argument(help="The model: a folder written by didi.")],
    metrics: Annotated[str, typer.Option(help="Comma-separated; nelbo: likelihood of --data.")],
    data: Annotated[
        str | None, typer.Option(help="Text file or folder, prepared folder, or oracle.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a record that has the text.")] = "text",
    documents: Annotated[
        str, typer.Option(help="What a document is in a .txt file: file, line or paragraph.")
    ] = "file",
    sequences: Annotated[int, typer.Option(help="Rows of data to use at most.")] = 1024,
    draws: Annotated[int, typer.Option(help="Noise levels per row.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 32,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers here.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
) -> None:
    """Measure a model: likelihood of held-out text, with its confidence interval."""
    for metric in filter(None, map(str.strip, metrics.split(","))):
        if metric not in METRICS:
            raise UserError(f"`{metric}` is not a metric. Known: {', '.join(METRICS)}.")
    if data is None:
        raise UserError("The metric nelbo needs text to measure: add --data DATA.")
    if min(sequences, draws, batch_size) < 1:
        raise UserError("--sequences, --draws and --batch-size are 1 or more.")
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise UserError(f"--json {json_file}: give a file in a folder that exists.")
    from didi_instruct.api.evaluate import evaluate_likelihood
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.data.readers import ReadOptions, check_documents

    with ProgressBar() as bar:
        report = evaluate_likelihood(
            source,
            data,
            sequences=sequences,
            draws=draws,
            batch_size=batch_size,
            seed=seed,
            reading=ReadOptions(field=field, documents=check_documents(documents)),
            device=device,
            progress=lambda done, total: bar.update("Measuring", done, total, "rows"),
        )
    _show(report.rows[0], report.reference)
    if json_file is not None:
        report.write(json_file)
        typer.echo(f"Wrote {json_file}")


def _show(row: dict[str, Any], reference: dict[str, Any]) -> None:
    low, high = row["nelbo_ci95"] or (float("-inf"), float("inf"))
    kind = "NELBO (upper bound)" if row["bound"] else "NLL (exact)"
    typer.echo(
        f"{kind}: {row['nelbo']:.4f} nats per token, 95% [{low:.4f}, {high:.4f}], "
        f"perplexity {row['nelbo_ppl']:.3f}; {row['num_sequences']} rows x {row['draws']} draws"
    )
    if reference:
        typer.echo(
            f"The same rows cost the oracle itself {reference['exact_nll']:.4f}: "
            f"ratio {row['nelbo'] / reference['exact_nll']:.4f}. "
            f"Entropy {reference['entropy']:.4f} +- {reference['entropy_se']:.4f}."
        )
