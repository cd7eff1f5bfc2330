"""`didi eval`."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from didi_instruct.cli.files import check_target
from didi_instruct.cli.judging import (
    JudgeBeyond,
    JudgeCollapsesSpaces,
    JudgeEnd,
    JudgeTemperature,
)
from didi_instruct.cli.likelihood import NELBO, ZERO_SHOT, default_folder, nelbo, zero_shot
from didi_instruct.cli.tasks import (
    Limit,
    Permute,
    SftShare,
    Shots,
    TaskName,
    check_flags,
    given_flags,
    run_task,
    task_settings,
)
from didi_instruct.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from didi_instruct.evaluation.measuring import Evaluation

TEMPERATURES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
TOP_PS = (0.98, 0.95, 0.9, 0.8)
"""Settings of `--frontier`, beside the plain one."""


def command(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="Models: folders, files, hub ids."),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Comma-separated: ppl, entropy, unique-4gram, self-bleu, self-bleu-words, mauve, "
            "path-kl, ar-kl, c2st; of proteins plddt, clusters, repeats, composition, novelty; or "
            "nelbo, the likelihood of --data; or zero-shot, that of seven corpora."
        ),
    ] = "entropy,unique-4gram,self-bleu",
    task: TaskName = None,
    steps: Annotated[str, typer.Option(help="Comma-separated step counts.")] = "8,16,32",
    judge: Annotated[
        str | None,
        typer.Option(help="oracle, a didi folder, a causal LM (folder, hub id, GGUF file)."),
    ] = None,
    judge_temperature: JudgeTemperature = 1.0,
    judge_collapse_spaces: JudgeCollapsesSpaces = False,
    judge_end: JudgeEnd = None,
    judge_beyond: JudgeBeyond = "cut",
    reference: Annotated[
        str | None,
        typer.Option(
            help="What to compare with, for mauve and c2st: text, or a file of samples (a teacher "
            "with all its steps). For composition and novelty: real chains, as FASTA."
        ),
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
    num: Annotated[
        int | None, typer.Option(help="Samples per row (default: 256; 40 for proteins).")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample (default: the model's; drawn where texts end)."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Comma-separated lengths: rows for each, and means over them."),
    ] = None,
    folding: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="For plddt: a folding model, such as facebook/esmfold_v1."
        ),
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="As in `didi generate`.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Of the sampler or task."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1)] = 1.0,
    until_eot: Annotated[
        bool,
        typer.Option(
            "--until-eot",
            help="A text ends at its end-of-text, as it always does where each has a window of "
            "its own.",
        ),
    ] = False,
    samples: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Saved samples; may be repeated.")
    ] = None,
    ar_start: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="For ar-kl: a left-to-right model of didi to begin with, which learns the samples "
            "from there. It must not have seen them.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For a model that brings none, and for text beside saved samples alone: gpt2, a "
            "folder, a tokenizer.json."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for samples and numbers (default: evals/MODEL).")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="For nelbo: text file or folder, prepared folder, oracle. For zero-shot: folder "
            "of the corpora's files (default: the hub). For a task: its folder."
        ),
    ] = None,
    corpora: Annotated[
        str | None,
        typer.Option(
            help="For zero-shot: ptb, wikitext, lm1b, lambada, ag_news, pubmed, arxiv (all)."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a record that has the text.")] = "text",
    documents: Annotated[
        str, typer.Option(help="What a document is in a .txt file: file, line or paragraph.")
    ] = "file",
    sequences: Annotated[
        int, typer.Option(help="For nelbo and zero-shot: rows of a text at most.")
    ] = 1024,
    shots: Shots = None,
    sft_share: SftShare = None,
    permute: Permute = None,
    limit: Limit = None,
    draws: Annotated[
        int, typer.Option(help="Noise levels per row of a NELBO; for a task, per answer.")
    ] = 8,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 32,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers here.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What to round the weights to: bfloat16.")
    ] = None,
) -> None:
    """Measure models: samples, the likelihood of text, or accuracy on a task."""
    given = given_flags(context)
    check_flags(given, task)
    _check_files(json_file, out)
    if task is not None:
        run_task(
            task,
            sources or [],
            data,
            task_settings(given, context.params, options),
            json_file=json_file,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
        )
        return
    names = list(dict.fromkeys(name.strip() for name in metrics.split(",") if name.strip()))
    if min(sequences, draws, batch_size) < 1:
        raise UserError("--sequences, --draws and --batch-size are 1 or more.")
    from didi_instruct.config.schema import apply_overrides
    from didi_instruct.data.readers import ReadOptions, check_documents

    reading, models = ReadOptions(field=field, documents=check_documents(documents)), sources or []
    _check_alone(names, data, corpora)
    _check_dtype(dtype, names, [*models, *([against] if against else [])])
    noise = {"sequences": sequences, "draws": draws, "batch_size": batch_size, "seed": seed}
    if NELBO in names:
        nelbo(
            models, data, noise, reading,
            tokenizer=tokenizer, json_file=json_file, device=device, dtype=dtype,
        )  # fmt: skip
        return
    if ZERO_SHOT in names:
        zero_shot(
            models, data, corpora, noise, out,
            tokenizer=tokenizer, json_file=json_file, device=device,
        )  # fmt: skip
        return
    budgets = _whole_numbers("--steps", steps)
    _check_most_steps(most_steps, budgets, against)
    if "ppl" in names and "entropy" not in names:
        names.append("entropy")  # perplexity alone proves nothing
    from didi_instruct.evaluation.config import EvalConfig
    from didi_instruct.evaluation.scores import JudgeConfig

    config = EvalConfig(
        metrics=tuple(names),
        steps=budgets,
        most_steps=most_steps,
        num=num,
        length=length,
        lengths=() if lengths is None else _whole_numbers("--lengths", lengths),
        sampler=sampler,
        options=apply_overrides({}, options or (), flag="--option"),
        temperature=temperature,
        top_p=top_p,
        temperatures=TEMPERATURES if frontier else (),
        top_ps=TOP_PS if frontier else (),
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
        reference=reference,
        reading=reading,
        judging=JudgeConfig(
            batch_size=batch_size,
            temperature=judge_temperature,
            collapse_spaces=judge_collapse_spaces,
            end=judge_end,
            beyond=judge_beyond,  # type: ignore[arg-type]
            draws=draws,
        ),
        start=ar_start,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    files = samples or []
    folder = out or default_folder([*models, *map(str, files)], against)
    from didi_instruct.cli.progress import ProgressBar
    from didi_instruct.evaluation.evaluate import evaluate

    with ProgressBar() as bar:
        found = evaluate(
            models,
            config,
            out=folder,
            judge=judge,
            baseline=against,
            samples=files,
            folding=folding,
            progress=lambda stage, done, total: bar.update(
                stage, done, total, "rows" if stage.startswith("Drawing") else "texts"
            ),
        )
    _show(found, folder, json_file)


def _show(found: "Evaluation", folder: Path, json_file: Path | None) -> None:
    """Write JSON and the report, print the heart of it, and say where they are."""
    from rich.console import Console

    from didi_instruct.evaluation.provenance import provenance
    from didi_instruct.evaluation.report import Report, short_names

    if json_file is not None:
        found.write(json_file)
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
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    many = "" if counts == [1] else "s"
    typer.echo(f"{span} sample{many} per row; samples and numbers in {folder}")
    typer.echo(f"Report: {page}{replaced}")
    if json_file is not None:
        typer.echo(f"Wrote {json_file}")


def _check_most_steps(
    most_steps: int | None, budgets: tuple[int, ...], against: str | None
) -> None:
    if most_steps is None:
        return
    if against is None:
        raise UserError("--most-steps are the baseline's: name it with --against SOURCE.")
    if most_steps <= max(budgets):
        raise UserError(
            f"--most-steps {most_steps} is the end of the gap that --steps "
            f"{','.join(map(str, budgets))} begin: use more than all of them."
        )


def _check_files(json_file: Path | None, out: Path | None) -> None:
    """Refuse what could not be written afterwards."""
    if json_file is not None:
        check_target(json_file)
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, give a folder.")


def _check_dtype(dtype: str | None, metrics: "Sequence[str]", models: "Sequence[str]") -> None:
    """Refuse a type that is none, before anything is loaded."""
    if dtype is None:
        return
    from didi_instruct.model import dtype_of

    dtype_of(dtype)
    if ZERO_SHOT in metrics:
        raise UserError("--dtype is for samples and nelbo: leave it out of zero-shot.")
    if not models:
        raise UserError("--dtype is for models, and samples are drawn already: leave it out.")


def _check_alone(metrics: "Sequence[str]", data: str | None, corpora: str | None) -> None:
    """Refuse unknown names, and measures of text and of samples in one table."""
    from didi_instruct.config.schema import nearest
    from didi_instruct.evaluation.metrics import METRICS

    known = [*METRICS, NELBO, ZERO_SHOT]
    for name in metrics:
        if name not in known:
            raise UserError(f"`{name}` is not a metric.{nearest(name, known)}")
        if name in (NELBO, ZERO_SHOT) and len(metrics) > 1:
            raise UserError(f"{name} measures text, other metrics samples: ask for it alone.")
    if corpora is not None and ZERO_SHOT not in metrics:
        raise UserError("--corpora is for the metric zero-shot.")
    if data is not None and not {NELBO, ZERO_SHOT} & {*metrics}:
        raise UserError(
            "--data is for the metrics nelbo and zero-shot; what samples are compared with is "
            "--reference."
        )


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """`8,16` as numbers."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(f"{flag} {text}: whole numbers, 1 or more, separated by commas.")
    return numbers
