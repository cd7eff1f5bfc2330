"""`didi bench`: a model's sampler beside its floor, the plain way and left-to-right decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from didi_instruct.api.bench_cases import make_cases
from didi_instruct.api.bench_plan import BenchPlan, open_model, open_others
from didi_instruct.benchmarking.report import Bench, add_ratios, make_rows
from didi_instruct.benchmarking.timing import TOO_LARGE, Case, Progress, empty, time_cases
from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.model import Model
from didi_instruct.models.compile import remarks
from didi_instruct.training.distributed import pick_device

SWEEPS: dict[str, tuple[int, ...]] = {
    "length": (256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 4, 16, 64, 256),
    "steps": (1, 4, 16, 64, 256, 1024),
    "vocabulary": (1024, 4096, 16384, 50257, 131072),
}
"""What may grow, and where it is looked at if nobody says."""


def bench(plan: BenchPlan, progress: Progress | None = None) -> Bench:
    """Time a model's sampler and what it is told against."""
    models = [open_model(plan)]
    rows = _rows(models, open_others(plan), plan, progress)
    return Bench(plan.name, rows, about(plan, models[0]))


def sweep(
    plan: BenchPlan, name: str, values: Sequence[int], progress: Progress | None = None
) -> Bench:
    """Time the same at several lengths, batches, steps or sizes of vocabulary, small to large.

    Where the first row of a size no longer fits into memory the sweep ends; lengths that a source
    does not read are left out.
    """
    values = _checked(plan, name, values)
    models, others = [open_model(_at(plan, name, values[0]))], open_others(plan)
    facts = about(plan, models[0])
    if name == "length":
        values = _readable(plan, values, {plan.row: models[0], **others})
    rows: list[dict[str, Any]] = []
    for number, value in enumerate(values):
        tell = None if progress is None else _within(progress, f"{name} {value}", number, values)
        found = _rows(models, others, _at(plan, name, value), tell)
        if name == "vocabulary":
            found = [{**row, "vocabulary": value} for row in found]
        rows += found
        if found[0]["seconds_median"] is None:
            break
    return Bench(plan.name, add_ratios(rows), {**facts, "remarks": list(remarks)})


def _checked(plan: BenchPlan, name: str, values: Sequence[int]) -> list[int]:
    """Sizes from small to large; whatever is wrong with one is said before any is timed."""
    if name not in SWEEPS:
        raise UserError(f"`{name}` is not a sweep. Known: {', '.join(SWEEPS)}.")
    if not values or min(values) < 1:
        raise UserError(f"--sweep {name}: give whole numbers, 1 or more.")
    if name == "vocabulary" and plan.arch is None:
        raise UserError("A model has one vocabulary: sweep it with --arch NAME.")
    values = sorted(values)
    if plan.arch is not None:
        for value in values:
            assert _at(plan, name, value).config
    return values


def _readable(plan: BenchPlan, values: list[int], models: Mapping[str, Model]) -> list[int]:
    """The lengths that all sources read; an architecture grows as it has to."""
    sources = {n: m.config.length for n, m in models.items() if plan.arch is None or n != plan.row}
    for name, most in sources.items():
        values = [value for value in values if value <= most]
        if not values:
            raise UserError(f"--sweep length: {name} reads {most} tokens, use that or less.")
    return values


def _at(plan: BenchPlan, name: str, value: int) -> BenchPlan:
    if name == "vocabulary":
        return replace(plan, model={**plan.model, "vocab_size": value + 1})
    changed: dict[str, Any] = {name: value}
    return replace(plan, **changed)


def _within(progress: Progress, stage: str, number: int, values: Sequence[int]) -> Progress:
    """Progress of one size as a part of that of all."""
    return lambda case, done, total: progress(
        f"{stage}, {case}", number * total + done, len(values) * total
    )


def _rows(
    models: list[Model], others: Mapping[str, Model], plan: BenchPlan, progress: Progress | None
) -> list[dict[str, Any]]:
    """Rows of one size. `models` holds the model alone, and another one after an arch has grown."""
    device = pick_device(plan.device)
    try:
        if plan.arch is not None and models[0].config != plan.config:
            models.clear()  # before the next one takes its place
            models.append(open_model(plan))
        cases = make_cases(models[0], others, plan)
    except TOO_LARGE as error:
        config = plan.config if plan.arch is not None else models[0].config
        length, steps = plan.length or config.length, plan.wanted_steps
        cases = [Case.impossible(plan.row, plan.batch, length, steps, error)]
    timings = time_cases(cases, plan.repeat, device, progress)
    rows = make_rows(cases, timings)
    del cases
    empty(device)
    return rows


def about(plan: BenchPlan, model: Model) -> dict[str, Any]:
    """What the numbers depend on."""
    device = model.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "dtype": plan.dtype or str(next(model.network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "fast": model.is_accelerated,
        "repeat": plan.repeat,
        "remarks": list(remarks),
        "versions": provenance(),
    }
