"""`didi eval --metrics nelbo` and `--metrics zero-shot`: the likelihood of text."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from didi_instruct.data.readers import ReadOptions
    from didi_instruct.evaluation.measuring import Evaluation

NELBO, ZERO_SHOT = "nelbo", "zero-shot"


def nelbo(
    sources: "Sequence[str]",
    data: str | None,
    noise: dict[str, int],
    reading: "ReadOptions",
    *,
    tokenizer: str | None,
    json_file: Path | None,
    device: str | None,
    dtype: str | None,
) -> None:
    """Likelihood of held-out text, with its confidence interval."""
    if len(sources) != 1:
        raise UserError("The metric nelbo measures one model: name it.")
    if data is None:
        raise UserError("The metric nelbo needs text to measure: add --data DATA.")
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.evaluation.text_likelihood import evaluate_likelihood

    with ProgressBar() as bar:
        found = evaluate_likelihood(
            sources[0],
            data,
            **noise,
            reading=reading,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            progress=lambda done, total: bar.update("Measuring", done, total, "rows"),
        )
    _show(found.rows[0], found.reference)
    _write(found, sources, json_file)


def zero_shot(
    sources: "Sequence[str]",
    data: str | None,
    corpora: str | None,
    noise: dict[str, int],
    out: Path | None,
    *,
    tokenizer: str | None,
    json_file: Path | None,
    device: str | None,
) -> None:
    """Likelihood of the seven corpora, one row each."""
    if not sources:
        raise UserError("The metric zero-shot measures models: name one or more.")
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.evaluation.text_likelihood import evaluate_zero_shot

    names = [name.strip() for name in (corpora or "").split(",") if name.strip()]
    if corpora is not None and not names:
        raise UserError("--corpora names no corpus: leave it out for all seven.")
    folder = out or default_folder(sources)
    with ProgressBar() as bar:
        found = evaluate_zero_shot(
            sources,
            out=folder,
            corpora=names,
            data=data,
            **noise,
            tokenizer=tokenizer,
            device=device,
            progress=lambda stage, done, total: bar.update(
                stage, done, total, "corpora" if stage == "Reading" else "rows"
            ),
        )
    for line in table(found.rows):
        typer.echo(line)
    if len({row["length"] for row in found.rows}) > 1:
        typer.echo("Perplexities at different lengths do not compare: a longer row tells more.")
    typer.echo(f"At most {noise['sequences']} rows of a corpus; numbers in {folder}")
    _write(found, sources, json_file)


def default_folder(sources: "Sequence[str]", against: str | None = None) -> Path:
    """Default folder of an evaluation, named after the models or the files of samples."""
    paths = [Path(source).resolve() for source in sources]
    name = "+".join(path.stem if path.is_file() else path.name for path in paths) or "samples"
    rival = f"-against-{Path(against).resolve().name}" if against else ""
    return Path("evals") / f"{name}{rival}"[:120]


def table(rows: "Sequence[dict[str, Any]]") -> list[str]:
    """Rows as text, one per model and corpus."""
    width = max(5, *(len(row["model"]) for row in rows))
    titles = ("corpus", "perplexity", "95% interval", "nats", "rows", "length", "tokens", "draws")
    spaces = (9, 13, 22, 9, 8, 8, 10, 7)
    lines = ["model".ljust(width) + "".join(map(str.rjust, titles, spaces))]
    for row in rows:
        low, high = row["nelbo_ppl_ci95"] or (None, None)
        cells = (
            row["corpus"],
            ("≤ " if row["bound"] else "") + _number(row["nelbo_ppl"]),
            f"[{_number(low)}, {_number(high)}]",
            f"{row['nelbo']:.4f}",
            str(row["num_sequences"]),
            str(row["length"]),
            str(row["tokens"]),
            str(row["draws"]),
        )
        lines.append(row["model"].ljust(width) + "".join(map(str.rjust, cells, spaces)))
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _show(row: dict[str, Any], reference: dict[str, Any]) -> None:
    low, high = row["nelbo_ci95"] or (float("-inf"), float("inf"))
    kind = "NELBO (upper bound)" if row["bound"] else "NLL (exact)"
    typer.echo(
        f"{kind}: {row['nelbo']:.4f} nats per token, 95% [{low:.4f}, {high:.4f}], "
        f"perplexity {_number(row['nelbo_ppl'])}; {row['num_sequences']} rows x "
        f"{row['draws']} draws"
    )
    if reference:
        typer.echo(
            f"The same rows cost the oracle itself {reference['exact_nll']:.4f}: "
            f"ratio {row['nelbo'] / reference['exact_nll']:.4f}. "
            f"Entropy {reference['entropy']:.4f} +- {reference['entropy_se']:.4f}."
        )


def _write(found: "Evaluation", sources: "Sequence[str]", json_file: Path | None) -> None:
    if json_file is not None:
        replace(found, model=", ".join(sources)).write(json_file)
        typer.echo(f"Wrote {json_file}")
