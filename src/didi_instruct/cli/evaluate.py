"""`didi eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from didi_instruct.data.readers import ReadOptions

LIKELIHOOD = "nelbo"
TEMPERATURES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
TOP_PS = (0.98, 0.95, 0.9, 0.8)
"""Settings of `--frontier`, beside the plain one."""
COLUMNS = (
    ("steps", "steps", "{}"),
    ("passes", "passes", "{:.1f}"),
    ("T", "temperature", "{:g}"),
    ("top-p", "top_p", "{:g}"),
    ("ppl", "ppl", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("path KL", "path_kl", "{:.3f}"),
    ("gap closed", "gap_closed", "{:.1%}"),
    ("vsF", "vsf", "{:.3f}"),
    ("vsF passes", "vsf_passes", "{:.3f}"),
    ("AR KL ≥", "ar_kl", "{:.3f}"),
    ("AUC", "c2st_auc", "{:.3f}"),
    ("MAUVE", "mauve", "{:.3f}"),
    ("Self-BLEU", "self_bleu", "{:.3f}"),
    ("4-grams", "unique_4gram", "{:.3f}"),
)
"""Title, field of the row, format."""


def command(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SOURCE...", help="Models: didi's folders.")
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Comma-separated: ppl, entropy, unique-4gram, self-bleu, mauve, path-kl, ar-kl, "
            "c2st; or nelbo, the likelihood of --data."
        ),
    ] = "entropy,unique-4gram,self-bleu",
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "8,16,32",
    judge: Annotated[
        str | None,
        typer.Option(help="oracle, a didi folder, a causal LM (folder, hub id, GGUF file)."),
    ] = None,
    judge_temperature: Annotated[float, typer.Option(help="Divides the judge's logits.")] = 1.0,
    reference: Annotated[
        str | None, typer.Option(help="Text to compare with, for mauve and c2st.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Baseline: vsF and gap closed.")
    ] = None,
    most_steps: Annotated[
        int | None,
        typer.Option(min=1, help="The baseline's steps at its best, for the gap closed."),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Sweep temperature and top-p.")
    ] = False,
    num: Annotated[int, typer.Option(help="Samples per row.")] = 256,
    length: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    sampler: Annotated[str | None, typer.Option(help="As in `didi generate`.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of the sampler.")
    ] = None,
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    until_eot: Annotated[
        bool, typer.Option("--until-eot", help="A text ends at its end-of-text.")
    ] = False,
    samples: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Saved samples; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for samples and numbers (default: evals/MODEL).")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="For nelbo: text file or folder, prepared folder, oracle.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a record that has the text.")] = "text",
    documents: Annotated[
        str, typer.Option(help="What a document is in a .txt file: file, line or paragraph.")
    ] = "file",
    sequences: Annotated[int, typer.Option(help="For nelbo: rows of data at most.")] = 1024,
    draws: Annotated[int, typer.Option(help="Noise levels per row of a NELBO.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 32,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers here.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
) -> None:
    """Measure models: quality and variety of their samples, or the likelihood of text."""
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise UserError(f"--json {json_file}: give a file in a folder that exists.")
    if min(sequences, draws, batch_size) < 1:
        raise UserError("--sequences, --draws and --batch-size are 1 or more.")
    from didi_instruct.data.readers import ReadOptions, check_documents

    reading = ReadOptions(field=field, documents=check_documents(documents))
    common: dict[str, Any] = {"reading": reading, "json_file": json_file, "device": device}
    models = sources or []
    if LIKELIHOOD in names:
        if len(names) > 1:
            raise UserError("nelbo measures text, the other metrics samples: ask for it alone.")
        noise = {"sequences": sequences, "draws": draws, "batch_size": batch_size, "seed": seed}
        _likelihood(models, data, noise, **common)
        return
    from didi_instruct.api.quality import Plan, check_metrics
    from didi_instruct.config.parse import apply_overrides

    check_metrics(names, judge is not None, reference is not None)
    plan = Plan(
        steps=_whole_numbers("--steps", steps),
        most_steps=most_steps,
        num=num,
        length=length,
        sampler=sampler,
        options=apply_overrides({}, options or (), flag="--option"),
        temperature=temperature,
        top_p=top_p,
        temperatures=TEMPERATURES if frontier else (),
        top_ps=TOP_PS if frontier else (),
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
    )
    settings = {"temperature": judge_temperature, "draws": draws, "batch_size": batch_size}
    _quality(models, plan, names, judge, settings, reference, against, samples or [], out, **common)


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """`8,16` as numbers."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(f"{flag} {text}: whole numbers, 1 or more, separated by commas.")
    return numbers


def _quality(
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
    reading: "ReadOptions",
    json_file: Path | None,
    device: str | None,
) -> None:
    """Sample quality, as a table and as JSON."""
    from didi_instruct.api.evaluate import Report
    from didi_instruct.api.quality import evaluate_quality
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.evaluation.judges import open_judge

    first = Path(sources[0]) if sources else (samples[0] if samples else Path("samples"))
    folder = out or Path("evals") / first.resolve().stem
    opened = None if judge is None else open_judge(judge, device=device, **judge_settings)
    with ProgressBar() as bar:
        found = evaluate_quality(
            sources,
            plan,
            metrics,
            out=folder,
            judge=opened,
            reference=reference,
            reading=reading,
            against=against,
            samples=samples,
            device=device,
            progress=lambda stage, done, total: bar.update(stage, done, total, "done"),
        )
    for line in table([*found.rows, *found.baseline], found.reference):
        typer.echo(line)
    typer.echo(f"{plan.num} samples per row, seed {plan.seed}; samples and numbers in {folder}")
    if json_file is not None:
        name = ", ".join(sources) or ", ".join(map(str, samples))
        Report(name, found.judge, found.rows, found.reference, found.baseline).write(json_file)
        typer.echo(f"Wrote {json_file}")


def table(rows: "Sequence[dict[str, Any]]", reference: dict[str, Any]) -> list[str]:
    """Rows as text: the columns that have numbers, aligned."""
    everything = [*rows, *([reference] if reference else [])]
    shown = [c for c in COLUMNS if any(row.get(c[1]) is not None for row in everything)]
    width = max(len(str(row["model"])) for row in everything)
    lines = ["model".ljust(width) + "".join(title.rjust(12) for title, _, _ in shown)]
    for row in everything:
        plain = {} if row is not reference else {"steps": None, "passes": None}
        cells = [_cell({**row, **plain}.get(name), form) for _, name, form in shown]
        lines.append(str(row["model"]).ljust(width) + "".join(cell.rjust(12) for cell in cells))
    return lines


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def _likelihood(
    sources: "Sequence[str]",
    data: str | None,
    noise: dict[str, int],
    *,
    reading: "ReadOptions",
    json_file: Path | None,
    device: str | None,
) -> None:
    """Likelihood of held-out text, with its confidence interval."""
    if len(sources) != 1:
        raise UserError("The metric nelbo measures one model: name it.")
    if data is None:
        raise UserError("The metric nelbo needs text to measure: add --data DATA.")
    from didi_instruct.api.evaluate import evaluate_likelihood
    from didi_instruct.cli.progress import ProgressBar

    with ProgressBar() as bar:
        report = evaluate_likelihood(
            sources[0],
            data,
            **noise,
            reading=reading,
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
