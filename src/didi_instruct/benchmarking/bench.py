"""`didi bench`: a model's sampler, or an iteration of distillation, beside its rivals."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct.benchmarking.cases import make_cases, open_model, open_others, steps_of
from didi_instruct.benchmarking.naive_distillation import distill_case
from didi_instruct.benchmarking.timing import (
    MEMORY_ERRORS,
    Case,
    Progress,
    Timing,
    empty,
    time_cases,
)
from didi_instruct.config.bench import BenchConfig
from didi_instruct.config.train import Compile
from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.model import Model, dtype_of
from didi_instruct.models.compile import remarks
from didi_instruct.models.dit import DiT
from didi_instruct.training.distributed import World, pick_device

Row = dict[str, Any]
SWEEPS: dict[str, tuple[int, ...]] = {
    "length": (256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 4, 16, 64, 256),
    "steps": (1, 4, 16, 64, 256, 1024),
    "vocabulary": (1024, 4096, 16384, 50257, 131072),
}
"""Quantities that a sweep varies, and the values it takes by default."""
COMPILE_MODES: dict[str, Compile] = {"on": "on", "plain": "off", "naive": "off"}
"""`train.compile` of the rows that a distillation is compared with."""
DISTILL_WARM_UP = 4
"""Untimed runs of a distillation, in which the shapes of its iterations are compiled."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bench:
    """Timed rows and what they depend on."""

    model: str
    rows: list[Row]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Device, precision and versions."""

    def write(self, path: Path) -> None:
        """Write JSON."""
        value = {"model": self.model, "rows": self.rows, **self.about}
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def bench(config: BenchConfig, progress: Progress | None = None) -> Bench:
    """Time a model's sampler and its rivals."""
    return _bench([(config, {})], [open_model(config)], open_others(config), progress)


def sweep(
    config: BenchConfig, name: str, values: Sequence[int], progress: Progress | None = None
) -> Bench:
    """Time a sampler and its rivals at several values of one of `SWEEPS`, from small to large.

    The sweep ends at the first value that does not fit into memory. Lengths that a source does not
    read are left out.
    """
    values = _checked(config, name, values)
    models, others = [open_model(config.at(name, values[0]))], open_others(config)
    if name == "length":
        own = {} if config.source is None else {config.source: models[0]}
        values = _readable(values, own | others)

    points: list[tuple[BenchConfig, Row]] = [
        (config.at(name, value), {name: value} if name == "vocabulary" else {}) for value in values
    ]
    return _bench(points, models, others, progress)


def _checked(config: BenchConfig, name: str, values: Sequence[int]) -> list[int]:
    """Return the values in order, once all of them are known to be possible."""
    if name not in SWEEPS:
        raise UserError(f"`{name}` is not a sweep. Known: {', '.join(SWEEPS)}.")
    if not values or min(values) < 1:
        raise UserError(f"--sweep {name}: give whole numbers, 1 or more.")
    if name == "vocabulary" and config.arch is None:
        raise UserError("A model has one vocabulary: sweep it with --arch NAME.")
    if config.arch is not None:
        for value in sorted(values):
            assert config.at(name, value).architecture
    return sorted(values)


def _readable(values: list[int], sources: Mapping[str, Model]) -> list[int]:
    """Return the lengths that all sources read."""
    for name, model in sources.items():
        most = model.config.length
        values = [value for value in values if value <= most]
        if not values:
            raise UserError(f"--sweep length: {name} reads {most} tokens, use that or less.")
    return values


def _bench(
    points: Sequence[tuple[BenchConfig, Row]],
    models: list[Model],
    others: Mapping[str, Model],
    progress: Progress | None,
) -> Bench:
    """Time points, settings and further columns of their rows, until one does not fit into memory.

    `models` holds one model and nothing else does: where an architecture has to grow, the old one
    is freed before the new one is built.
    """
    first, rows = points[0][0], []
    about, device = _about(first, models[0]), pick_device(first.device)
    for number, (point, columns) in enumerate(points):
        try:
            if point.arch is not None and models[0].config != point.architecture:
                models.clear()
                models.append(open_model(point))
            cases = make_cases(models[0], others, point)
        except MEMORY_ERRORS as error:
            config = point.architecture if point.arch is not None else models[0].config
            length, steps = point.length or config.length, steps_of(point)
            cases = [Case.impossible(point.row, point.batch, length, steps, error)]
        timings = time_cases(cases, point.repeat, device, _part(progress, number, len(points)))
        rows += make_rows(cases, timings, **columns)
        failed = timings[0].failure is not None
        del cases
        empty(device)
        if failed:
            break
    return Bench(first.name, add_ratios(rows), {**about, "remarks": list(remarks)})


def _part(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Progress of one point as a part of that of all."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, count * total)


def bench_distillation(config: BenchConfig, progress: Progress | None = None) -> Bench:
    """Time iterations of DiDi-Instruct: ours, then those of `COMPILE_MODES` that are asked for.

    `on` launches the kernels of a pass one by one, `plain` is not compiled, `naive` is dense.
    Weights are float32, as in training; passes run in bfloat16 where that is the config's dtype.
    """
    if set(config.against) - set(COMPILE_MODES):
        raise UserError("--distill compares with `on`, `plain` and `naive`: leave out the others.")
    if config.steps is not None or config.wanted_sampler is not None:
        raise UserError("--distill times iterations: leave out --steps, --guided and --sampler.")
    if config.dtype is not None:
        dtype_of(config.dtype)
    model = open_model(replace(config, dtype="float32", fast=False))
    network, length = model.network, model.config.length
    if not isinstance(network, DiT) or model.config.kind != "mdlm" or model.config.masks > 1:
        raise UserError("--distill is for masked models of the DiT family with one mask.")
    if config.length not in (None, length):
        raise UserError(
            f"--length is {config.length}, but texts have {length} tokens: leave it out."
        )
    if config.batch < 2:
        raise UserError("--batch is 1, but an advantage compares texts: use 2 or more.")
    world = World(model.device)
    cuda = world.device.type == "cuda"
    bf16 = cuda if config.dtype is None else config.dtype == "bfloat16"
    compiled = cuda if config.fast is None else config.fast
    own: Compile = ("auto" if cuda else "on") if compiled else "off"

    def case(name: str, compile: Compile, *, naive: bool = False) -> Case:
        return distill_case(
            name, network, config.batch, length, world, bf16=bf16, compile=compile, naive=naive
        )

    rivals = [case(name, COMPILE_MODES[name], naive=name == "naive") for name in config.against]
    cases = [case(config.row, own), *rivals]
    timings = time_cases(
        cases, config.repeat, world.device, progress, warm_up=DISTILL_WARM_UP, busy=True
    )
    about = _about(config, model) | {"dtype": "bfloat16" if bf16 else "float32", "fast": compiled}
    return Bench(config.name, make_rows(cases, timings), about)


def make_rows(cases: Sequence[Case], timings: Sequence[Timing], **columns: Any) -> list[Row]:
    """Return a row per case; one that did not run has nulls and a note."""
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
                "seconds_median": median,
                "seconds_min": min(timing.seconds, default=None),
                "seconds_max": max(timing.seconds, default=None),
                "tokens_per_second": None if median is None else tokens / median,
                "ms_per_step": None if median is None else 1e3 * median / steps,
                "gpu_busy": None if not median or timing.busy is None else timing.busy / median,
                "peak_memory_gib": None if timing.peak is None else timing.peak / GIB,
                "note": timing.failure or case.note,
                **columns,
            }
        )
    return add_ratios(rows)


def add_ratios(rows: list[Row]) -> list[Row]:
    """Set each row's time relative to that of the first."""
    first = rows[0]["seconds_median"] if rows else None
    for row in rows:
        seconds = row["seconds_median"]
        row["ratio_to_first"] = None if first is None or seconds is None else seconds / first
    return rows


def _about(config: BenchConfig, model: Model) -> dict[str, Any]:
    """Return what the numbers depend on."""
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if cuda else "CPU",
        "dtype": config.dtype or str(next(model.network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "fast": model.is_accelerated,
        "repeat": config.repeat,
        "remarks": list(remarks),
        "versions": provenance(),
    }
