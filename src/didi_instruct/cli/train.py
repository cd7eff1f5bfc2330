"""`didi pretrain`, `didi distill` and `didi finetune`."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from didi_instruct.cli.info import memory_lines

if TYPE_CHECKING:
    from didi_instruct.config.distill import DistillConfig, Method
    from didi_instruct.distill import DistillResult
    from didi_instruct.hub.run_budget import RunBudget
    from didi_instruct.training.run_dir import RunResult

Recipe = Annotated[str, typer.Argument(help="A shipped recipe, or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/RECIPE).")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")]

SHOWN = (
    "loss", "reward_student", "disc_accuracy", "student_steps", "aux_kl", "code_information",
    "path_entropy", "unique_4gram", "iterations_per_second",
)  # fmt: skip
"""Numbers on the progress bar of a distillation; log.jsonl has them all."""
MEASURES = {
    "path_kl": ("path KL", ".2f"),
    "path_entropy": ("path entropy", ".3f"),
    "judge_nats": ("judge", ".3f"),
    "entropy": ("entropy", ".3f"),
    "unique_4gram": ("unique 4-grams", ".3f"),
    "latent_share": ("latent entropy", ".1%"),
}
"""Measures of samples at each budget: their names for people, and formats."""
WRITTEN = (
    "model.safetensors", "adapter_model.safetensors", "discriminator.safetensors", "discriminator/",
    "config.json",
    "tokenizer.json", "recipe.yaml", "log.jsonl", "curves.png", "data/", "bank/", "checkpoints/",
)  # fmt: skip
"""Files of a finished run, where it has them."""
HELD_OUT = {"valid_nats_per_token": "nats per token", "valid_answer_nats": "nats per answer token"}
"""Measures of held-out data, in words."""


def pretrain(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = None,
) -> None:
    """Train a teacher (MDLM), a uniform-state teacher (DUO) or an AR model.

    Several processes: torchrun --nproc-per-node N -m didi_instruct pretrain ...
    """
    import didi_instruct as didi

    shared = _shared("pretrain", recipe, overrides, resume, device)
    result = didi.pretrain(**shared, out=out or _folder(recipe))
    _leave_unless_done(result)
    _conclude(result, f"Trained {result.outcome.step} steps.")


def distill(
    recipe: Recipe,
    teacher: Annotated[str, typer.Option(metavar="SOURCE", help="The model to distil.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="didi, token-matching, mixture, sdtt, dimo or duo, not the recipe's: what the "
            "recipe does not say of its own section is the published setting; rates, batch and "
            "steps stay the recipe's."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For a foreign teacher that brings none.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run (default: runs/RECIPE, with --method RECIPE-METHOD)."),
    ] = None,
    resume: Resume = False,
    device: Device = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check settings, tell the memory, and start nothing."),
    ] = False,
) -> None:
    """Distil a teacher into a student that needs few steps.

    Several processes: torchrun --nproc-per-node N -m didi_instruct distill ...
    """
    import didi_instruct as didi
    from didi_instruct.cli.progress import BankBar
    from didi_instruct.distill import plan
    from didi_instruct.distillation.methods import METHODS

    chosen = cast("Method | None", method)
    if dry_run:
        given: Any = {"overrides": overrides or (), "tokenizer": tokenizer, "device": device}
        for line in plan_lines(*plan(recipe, teacher=teacher, method=chosen, **given)):
            typer.echo(line)
        return
    display: Any = {"shown": SHOWN, "summary": evaluation_line}
    result = didi.distill(
        **_shared("distill", recipe, overrides, resume, device, **display),
        teacher=teacher,
        tokenizer=tokenizer,
        method=chosen,
        out=out or _folder(recipe, method),
        bank_progress=BankBar,
    )
    _leave_unless_done(result)
    for line in comparison(result):
        typer.echo(line)
    if result.curves is None:
        typer.echo('No curves.png: matplotlib is missing (pip install "didi-instruct[eval]").')
    flags = METHODS[result.config.method].sampling_flags(result.config)
    flags += ' --prompt "..."' if result.config.continues else ""
    _conclude(result, f"Distilled {result.outcome.step} iterations.", "student", flags)


def finetune(
    recipe: Annotated[
        str,
        typer.Argument(
            help="finetune-text, finetune-pubmed, finetune-answers, finetune-mmlu, or a YAML file."
        ),
    ],
    model: Annotated[str, typer.Option(metavar="SOURCE", help="The model to go on from.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="For a foreign model that brings none.")
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = None,
) -> None:
    """Go on training a model, on text or on prompts with answers.

    The data is named with --set data.source=..., and read with the model's tokenizer.
    Several processes: torchrun --nproc-per-node N -m didi_instruct finetune ...
    """
    import didi_instruct as didi

    result = didi.finetune(
        **_shared("finetune", recipe, overrides, resume, device),
        model=model,
        tokenizer=tokenizer,
        out=out or _folder(recipe),
    )
    _leave_unless_done(result)
    for name, words in HELD_OUT.items():
        both = [result.held_out.get(when, {}) for when in ("before", "after")]
        if all(name in numbers for numbers in both):
            before, after = (_with_half(numbers, name) for numbers in both)
            typer.echo(f"Held out: {before} -> {after} {words} (95%, the same noise).")
    _conclude(result, f"Fine-tuned {result.source} for {result.outcome.step} steps.")


def evaluation_line(values: Mapping[str, float]) -> str:
    """Numbers of an evaluation by measure, one for each budget: `path KL (4, 8 steps) 14.97, 7.69`.

    Those of the raw weights are in the log alone.
    """
    parts, budgets = [], _budgets(values)
    for name, (title, form) in MEASURES.items():
        cells = [_cell(values, f"{name}_{n}", form) for n in budgets]
        if cells and all(cells):
            parts.append(f"{title} {', '.join(cells)}")
    if "valid_nats_per_token" in values:
        parts.append(f"held-out text {values['valid_nats_per_token']:.4f} nats per token")
    at = f"at {', '.join(map(str, budgets))} steps: " if budgets else ""
    return at + "; ".join(parts)


def comparison(result: "DistillResult") -> Iterator[str]:
    """Teacher and student at every budget, as a small table; path KL where there is one."""
    budgets = _budgets(result.teacher)
    if not budgets or not result.student:
        return
    name, (title, form) = next(
        (n, m) for n, m in MEASURES.items() if f"{n}_{budgets[0]}" in result.teacher
    )
    yield title + _unit(name, result.exact)
    rows = {"teacher": (result.teacher, ""), "student": (result.student, "")}
    if any(name.endswith("_raw") for name in result.student):
        rows["raw"] = (result.student, "_raw")
    # A judge likes what is said often: its number never stands alone.
    shown = [name, "entropy"] if name == "judge_nats" else [name]
    width = 18 if len(shown) == 1 else 25
    yield "steps".rjust(10) + "".join(str(n).rjust(width) for n in budgets)
    for row, (numbers, tag) in rows.items():
        cells = [
            " / ".join(_cell(numbers, f"{one}_{n}{tag}", form) for one in shown) for n in budgets
        ]
        yield row.rjust(10) + "".join(cell.rjust(width) for cell in cells)


def _shared(
    verb: str,
    recipe: str,
    overrides: list[str] | None,
    resume: bool,
    device: str | None,
    **display: Any,
) -> dict[str, Any]:
    """Arguments of a training, as all three functions take them."""
    from didi_instruct.cli.progress import PrepareBar
    from didi_instruct.training.reporting import TerminalReporter

    return {
        "recipe": recipe,
        "overrides": overrides or (),
        "resume": resume,
        "device": device,
        "reporter": TerminalReporter(verb, **display),
        "data_progress": PrepareBar,
    }


def _folder(recipe: str, method: str | None = None) -> Path:
    return Path("runs") / "-".join(filter(None, (Path(recipe).stem, method)))


def plan_lines(config: "DistillConfig", budget: "RunBudget | None") -> Iterator[str]:
    """Say what a distillation would be, and the memory that it would take."""
    size = config.train.batch_size
    yield f"{config.method}: {config.iterations} iterations of {size} texts"
    if budget is None:
        yield "Memory is known of LLaDA's and Dream's shapes with adapters alone."
        return
    yield (
        f"adapters of rank {config.lora.rank} on {budget.layers} layers, {budget.numbers:,} "
        f"numbers for each network that learns; {budget.texts} texts of {budget.length} tokens in "
        "a pass"
    )
    yield from memory_lines(budget.parts)
    budget.check()
    yield f"{budget.device} has {budget.available / 1e9:.2f} GB. Nothing was started."


def _leave_unless_done(result: "RunResult") -> None:
    """Exit if a signal stopped the run, or if another process tells the rest."""
    # Not typer.Exit: its 130 is what Ctrl-C looks like where nothing was saved.
    step, signal = result.outcome.step, result.outcome.signal
    code = 0 if signal is None else 128 + signal
    if not result.is_main:
        sys.exit(code)
    if signal is not None:
        typer.echo(
            f"Stopped at step {step}; saved {result.outcome.checkpoint}. Go on with --resume."
        )
        sys.exit(code)


def _conclude(result: "RunResult", done: str, product: str = "model", flags: str = "") -> None:
    """Say what was written and how to sample it."""
    averaged = "averaged " if result.config.train.ema else ""
    written = ", ".join(name for name in WRITTEN if (result.folder / name).exists())
    if result.new:
        typer.echo(done)
    state = "Wrote" if result.new else "There is"
    typer.echo(f"{state} {result.folder} (the {averaged}{product}): {written}")
    typer.echo(f"Next: didi generate {result.folder} {flags}".rstrip())


def _budgets(values: Mapping[str, float]) -> list[int]:
    found = (re.fullmatch(r"(?:path_)?entropy_(\d+)", name) for name in values)
    return [int(match[1]) for match in found if match]


def _cell(values: Mapping[str, float], name: str, form: str) -> str:
    """A number with its standard error; empty where there is none."""
    if name not in values:
        return ""
    error = values.get(f"{name}_se")
    return f"{values[name]:{form}}" + (f" ± {error:{form}}" if error is not None else "")


def _with_half(numbers: Mapping[str, float], name: str) -> str:
    """A number and half of its interval, which one row alone does not have."""
    half = numbers.get("valid_ci95")
    return f"{numbers[name]:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _unit(name: str, exact: bool) -> str:
    """Unit of a measure, and its judge."""
    if name == "judge_nats":
        judge = "" if exact else ", by the teacher's own bound"
        return f"{judge}, nats per token (± standard error) / entropy of a sample's tokens"
    if name != "path_kl":
        return ", nats per token (texts that continue a prompt have no judge here)"
    unit = ", nats per sequence (± standard error)"
    if exact:
        return unit
    return f"{unit}, judged by the teacher's own bound: differences count, a value may be below 0"
