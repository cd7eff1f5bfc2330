"""`didi bench`: a model's sampler beside its floor, the plain way and left-to-right decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.api.model import Model, load
from didi_instruct.api.samplers import GuidedOptions, find_sampler
from didi_instruct.benchmarking.report import Bench, add_ratios, make_rows
from didi_instruct.benchmarking.sampling import ar_case, fill, floor_case, naive_case
from didi_instruct.benchmarking.timing import Case, Progress, empty, time_cases
from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.config.parse import parse
from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.models.build import build_model
from didi_instruct.models.denoising import Denoising
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.graphs import why_not
from didi_instruct.training.world import pick_device

SWEEPS: dict[str, tuple[int, ...]] = {
    "length": (256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 4, 16, 64, 256),
    "steps": (1, 4, 16, 64, 256, 1024),
    "vocabulary": (1024, 4096, 16384, 50257, 131072),
}
"""What may grow, and where it is looked at if nobody says."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to time."""

    source: str | None = None
    arch: str | None = None
    """A named architecture with random weights, instead of a source."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the architecture that differ."""
    against: tuple[str, ...] = ()
    """Further rows: `plain` (ours, neither compiled nor captured), `naive`, `ar`, other sources."""
    batch: int = 16
    length: int | None = None
    """Tokens of a text; by default all that the model reads."""
    steps: int = 16
    sampler: str | None = None
    guided: bool = False
    """Sample by RGAS, with a discriminator of random weights for an architecture."""
    repeat: int = 5
    device: str | None = None
    dtype: str | None = None
    """Of the weights; by default bfloat16 on a GPU and float32 on a CPU."""
    fast: bool | None = None
    """Compile and capture; by default wherever it is possible."""

    def __post_init__(self) -> None:
        """Refuse what cannot be timed."""
        if (self.source is None) == (self.arch is None):
            raise UserError("Give a model or --arch NAME, one of the two.")
        if self.model and self.arch is None:
            raise UserError("--set changes an architecture: use it with --arch.")
        for name in ("batch", "length", "steps", "repeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}: use 1 or more.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"`{self.dtype}` is not a dtype. Known: {', '.join(DTYPES)}.")
        if self.guided and self.sampler not in (None, "rgas"):
            raise UserError(f"--guided samples by rgas: leave out --sampler {self.sampler}.")

    @property
    def name(self) -> str:
        """The model in words."""
        return self.source or f"{self.arch} with random weights"


def bench(plan: BenchPlan, progress: Progress | None = None) -> Bench:
    """Time a model's sampler and what it is told against."""
    model = open_model(plan)
    return Bench(plan.name, _rows(model, plan, progress), about(plan, model))


def sweep(
    plan: BenchPlan, name: str, values: Sequence[int], progress: Progress | None = None
) -> Bench:
    """Time the same at several lengths, batches, steps or sizes of vocabulary, small to large.

    Where the first row of a size no longer fits into memory the sweep ends; lengths that a source
    does not read are left out.
    """
    if name not in SWEEPS:
        raise UserError(f"`{name}` is not a sweep. Known: {', '.join(SWEEPS)}.")
    if not values or min(values) < 1:
        raise UserError(f"--sweep {name}: give whole numbers, 1 or more.")
    if name == "vocabulary" and plan.arch is None:
        raise UserError("A model has one vocabulary: sweep it with --arch NAME.")
    values = sorted(values)
    grows = name == "length" and plan.arch is not None
    model = open_model(_at(plan, name, values[-1] if grows else values[0]))
    if name == "length":
        values = [value for value in values if value <= model.config.length]
        if not values:
            raise UserError(f"--sweep length: this model reads {model.config.length} tokens.")
    rows: list[dict[str, Any]] = []
    for number, value in enumerate(values):
        here = _at(plan, name, value)
        if name == "vocabulary" and number:
            del model  # before the next one takes its place
            model = open_model(here)
        tell = None if progress is None else _within(progress, f"{name} {value}", number, values)
        found = _rows(model, here, tell)
        if name == "vocabulary":
            found = [{**row, "vocabulary": value} for row in found]
        rows += found
        if found[0]["seconds_median"] is None:
            break
    return Bench(plan.name, add_ratios(rows), about(plan, model))


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


def open_model(plan: BenchPlan) -> Model:
    """The model to time, accelerated where that is wanted and possible."""
    device = pick_device(plan.device)
    dtype = _dtype(plan, device)
    if plan.source is not None:
        model = load(plan.source, device=str(device), dtype=dtype)
    else:
        model = random_model(plan, device, dtype)
    if plan.guided and model.discriminator is None and plan.source is not None:
        raise UserError(
            f"{plan.source} has no discriminator to guide it: distil with --method didi, or use "
            "--arch NAME, whose weights are random."
        )
    if plan.fast or (plan.fast is None and why_not(model.network) is None):
        model.accelerate()
    return model


def random_model(plan: BenchPlan, device: torch.device, dtype: torch.dtype) -> Model:
    """A named architecture with random weights: speed does not depend on what they say."""
    assert plan.arch is not None
    config = with_changes(architecture(plan.arch), plan.model)
    if plan.length is not None and plan.length > config.length:
        config = replace(config, length=plan.length)
    torch.manual_seed(0)
    network = build_model(config)
    fill(network)
    critic = None
    if plan.guided:
        if not isinstance(network, DiT):
            raise UserError(f"--guided is for masked models, and {plan.arch} is {config.kind}.")
        critic = Discriminator.from_denoiser(network).to(device, dtype)
    return Model(network.to(device, dtype), config, discriminator=critic)


def with_changes(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """An architecture with some settings replaced, checked."""
    if not changes:
        return config
    known = {name: getattr(config, name) for name in ("layers", "hidden", "heads", "vocab_size")}
    return parse(ModelConfig, {**known, **changes}, where="--set")


def _rows(model: Model, plan: BenchPlan, progress: Progress | None) -> list[dict[str, Any]]:
    cases = list(_cases(model, plan))
    timings = time_cases(cases, plan.repeat, model.device, progress)
    rows = make_rows(cases, timings)
    del cases
    empty(model.device)
    return rows


def _cases(model: Model, plan: BenchPlan) -> list[Case]:
    config, fast = model.config, model.is_accelerated
    length = config.length if plan.length is None else plan.length
    if length > config.length:
        raise UserError(f"--length is {length}: this model writes 1 to {config.length} tokens.")
    sampler = "rgas" if plan.guided else plan.sampler
    cases = [_sampling(plan.source or str(plan.arch), model, plan, length, sampler)]
    start = _start(model, plan.batch, length)
    if isinstance(model.network, Denoising):
        cases.append(floor_case(model.network, start, plan.steps, fast=fast))
    for name in plan.against:
        if name == "plain":
            twin = Model(model.network, config, discriminator=model.discriminator)
            cases.append(_sampling(name, twin, plan, length, sampler))
        elif name == "naive":
            cases.append(_naive(model, plan, start))
        elif name == "ar":
            fast_ar = plan.fast is not False and start.is_cuda
            dtype = next(model.network.parameters()).dtype
            cases.append(ar_case(config, start[:, :length], dtype, fast=fast_ar))
        else:
            other = open_model(replace(plan, source=name, arch=None, model={}, guided=False))
            cases.append(_sampling(name, other, plan, length, None))
    # Where a text has a window of its own, its end is read too, but not written.
    return [replace(case, length=length) for case in cases]


def _sampling(name: str, model: Model, plan: BenchPlan, length: int, sampler: str | None) -> Case:
    """What `didi generate` does."""
    found = find_sampler(sampler, model.config.kind)
    steps = None if found.counts_tokens else plan.steps

    def run(seed: int) -> None:
        model.sample(
            plan.batch, steps=steps, length=length, sampler=found.name, seed=seed,
            batch_size=plan.batch,
        )  # fmt: skip

    critic = model.discriminator if found.name == "rgas" else None
    networks = (model.network,) if critic is None else (model.network, critic)
    return Case(
        name=name, run=run, batch=plan.batch, length=length, steps=steps or length,
        networks=networks,
    )  # fmt: skip


def _naive(model: Model, plan: BenchPlan, start: Tensor) -> Case:
    if not isinstance(model.network, Denoising) or model.config.kind != "mdlm":
        raise UserError(f"`naive` is masked diffusion, and this model is {model.config.kind}.")
    if model.config.masks > 1 or plan.sampler not in (None, "ancestral", "rgas"):
        raise UserError("`naive` knows models with one mask, and the samplers ancestral and rgas.")
    guided = plan.guided or plan.sampler == "rgas"
    return naive_case(
        model.network,
        model.schedule,
        start,
        model.mask_symbol,
        plan.steps,
        model.discriminator if guided else None,
        GuidedOptions() if guided else None,
    )


def _start(model: Model, batch: int, length: int) -> Tensor:
    """(B, L) masks, as many as are to be written; where texts have windows, their ends too."""
    config = model.config
    symbol = 0 if config.kind == "duo" else model.mask_symbol
    start = torch.full((batch, length), symbol, device=model.device)
    if config.end_id is None or config.kind != "mdlm":
        return start
    return torch.nn.functional.pad(start, (0, config.length - length), value=config.end_id)


def _dtype(plan: BenchPlan, device: torch.device) -> torch.dtype:
    if plan.dtype is not None:
        return DTYPES[plan.dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def about(plan: BenchPlan, model: Model) -> dict[str, Any]:
    """What the numbers depend on."""
    device = model.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "dtype": str(next(model.network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "fast": model.is_accelerated,
        "repeat": plan.repeat,
        "versions": provenance(),
    }
