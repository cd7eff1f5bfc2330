"""Models and cases that `didi bench` times."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from didi_instruct.benchmarking.rivals import (
    ar_case,
    fill_zeros,
    naive_case,
    transformers_case,
    trunk_case,
)
from didi_instruct.benchmarking.timing import MEMORY_ERRORS, Case
from didi_instruct.config.bench import BenchConfig
from didi_instruct.errors import UserError
from didi_instruct.model import Model, dtype_of, load
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT, build_model
from didi_instruct.sampling.engines.cuda import why_not
from didi_instruct.sampling.registry import USUAL_STEPS, find_sampler
from didi_instruct.training.distributed import pick_device

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

RIVALS = ("plain", "naive", "ar", "transformers")
"""Rows that are not sources."""
HOST_BYTES = 40
"""Host memory per token that every sampler needs: a list of ids, and a few 8-byte numbers."""


def steps_of(config: BenchConfig) -> int:
    """Return the steps of samplers that do not take one per token."""
    return USUAL_STEPS if config.steps is None else config.steps


def open_model(config: BenchConfig) -> Model:
    """Open or build the model, accelerated where that is wanted and possible."""
    device = pick_device(config.device)
    dtype = dtype_of(config.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if config.source is None:
        model = _random_model(config, device, dtype)
    else:
        model = load(config.source, device=str(device), dtype=dtype)
    if config.wanted_sampler == "rgas" and model.discriminator is None:
        raise UserError(
            f"{config.source} has no discriminator to guide it: distil with --method didi, sample "
            "without rgas, or use --arch NAME, whose weights are random."
        )
    if config.fast or (config.fast is None and why_not(model.network) is None):
        model.accelerate()
    return model


def open_others(config: BenchConfig) -> dict[str, Model]:
    """Open the other sources by name."""
    names = [name for name in config.against if name not in RIVALS]
    return {name: open_model(replace(config, source=name, arch=None, model={})) for name in names}


def _random_model(config: BenchConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """Build the architecture with random weights: speed does not depend on their values."""
    shape, critic = config.architecture, None
    torch.manual_seed(0)
    network = build_model(shape)
    fill_zeros(network)
    if config.wanted_sampler == "rgas":
        if not isinstance(network, DiT):
            raise UserError(f"rgas is for masked models, and {config.arch} is {shape.kind}.")
        critic = Discriminator.from_network(network).to(device, dtype)
    return Model(network.to(device, dtype), shape, discriminator=critic)


def make_cases(model: Model, others: Mapping[str, Model], config: BenchConfig) -> list[Case]:
    """Return the cases in order; one that is too large to be built fails when it is run."""
    length = _text_length(model, others, config)
    ours = Sampling(config.row, model, config, length)
    if config.steps is not None and ours.counts_tokens:
        raise UserError(f"`{ours.sampler}` takes a step per token: leave out --steps.")
    try:
        start = _start(model, config.batch, length)
    except MEMORY_ERRORS as error:
        return [Case.impossible(config.row, config.batch, length, ours.steps, error)]
    cases, fast = [ours.case()], model.is_accelerated
    if not isinstance(model.network, ARModel):
        network = cast("Network", model.network)
        cases.append(trunk_case(network, start, lambda: ours.steps, fast=fast))
    for name in config.against:
        if name == "plain":
            twin = Model(model.network, model.config, discriminator=model.discriminator)
            cases.append(Sampling(name, twin, replace(config, fast=False), length).case())
        elif name == "naive":
            cases.append(_naive(model, config, start))
        elif name in ("ar", "transformers"):
            cases.append(_left_to_right(name, model, config, start[:, :length]))
        else:
            cases.append(Sampling(name, others[name], config, length).case())
    # Where a text has a window of its own, its end is read too, but not written.
    return [replace(case, length=length) for case in cases]


def _text_length(model: Model, others: Mapping[str, Model], config: BenchConfig) -> int:
    """Return the tokens of a text, which all models have to be able to write."""
    length = model.config.length if config.length is None else config.length
    for name, each in {config.row: model, **others}.items():
        most = each.config.length
        if most < length and config.length is not None:
            raise UserError(f"--length is {length}: {name} writes 1 to {most} tokens.")
        if most < length:
            raise UserError(
                f"{config.row} writes {length} tokens, and {name} up to {most}: "
                f"add --length {most}."
            )
    return length


class Sampling:
    """Sampling as `didi generate` does it; called with a seed, it returns the steps it took."""

    def __init__(self, name: str, model: Model, config: BenchConfig, length: int) -> None:
        self.name, self.model, self.config, self.length = name, model, config, length
        try:
            sampler = find_sampler(config.wanted_sampler, model.config.kind)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        self.sampler, self.counts_tokens = sampler.name, sampler.counts_tokens
        self.steps = length if sampler.counts_tokens else steps_of(config)
        """Expected steps; after a run, those that it took."""

    def __call__(self, seed: int) -> int:
        """Sample one batch."""
        batch = self.config.batch
        samples = self.model.draw(
            batch, steps=None if self.counts_tokens else steps_of(self.config),
            length=self.length, sampler=self.sampler, seed=seed, batch_size=batch,
            measure_path=False,
        )  # fmt: skip
        self.steps = samples.nfe
        return self.steps

    def case(self) -> Case:
        """Return it as a case."""
        critic = self.model.discriminator if self.sampler == "rgas" else None
        return Case(
            name=self.name, run=self, batch=self.config.batch, length=self.length,
            steps=self.steps, note=note(self.model, self.config),
            networks=(self.model.network,) if critic is None else (self.model.network, critic),
        )  # fmt: skip


def note(model: Model, config: BenchConfig) -> str | None:
    """Note in which way a model's row is not on equal terms with the others."""
    notes = []
    if model.device.type == "cuda" and config.fast is not False and not model.is_accelerated:
        notes.append(f"neither compiled nor captured ({why_not(model.network)})")
    ends = model.config.end_id is not None or model.tokenizer is not None
    if model.config.kind == "ar" and ends:
        notes.append("texts that end early count in full")
    return "; ".join(notes) or None


def _naive(model: Model, config: BenchConfig, start: Tensor) -> Case:
    kind, sampler = model.config.kind, config.wanted_sampler
    if kind != "mdlm":
        raise UserError(f"`naive` is masked diffusion, and this model is {kind}.")
    if model.config.masks > 1 or sampler not in (None, "ancestral", "rgas"):
        raise UserError("`naive` knows models with one mask, and the samplers ancestral and rgas.")
    return naive_case(model, start, steps_of(config), guided=sampler == "rgas")


def _left_to_right(name: str, model: Model, config: BenchConfig, start: Tensor) -> Case:
    make = ar_case if name == "ar" else transformers_case
    fast = config.fast is not False and start.is_cuda
    try:
        return make(model.config, start, next(model.network.parameters()).dtype, fast=fast)
    except (*MEMORY_ERRORS, ImportError) as error:
        batch, length = start.shape
        return Case.impossible(name, batch, length, length, error)


def _start(model: Model, batch: int, length: int) -> Tensor:
    """(B, L) masks to be written and, where texts have windows of their own, the ends behind."""
    config = model.config
    if batch * length * HOST_BYTES > _host_memory():  # or the system would kill the process
        raise MemoryError(f"{batch} texts of {length} tokens do not fit into memory")
    symbol = 0 if config.kind == "duo" else model.mask_symbol
    start = torch.full((batch, length), symbol, device=model.device)
    if config.end_id is None or config.kind != "mdlm":
        return start
    return torch.nn.functional.pad(start, (0, config.length - length), value=config.end_id)


def _host_memory() -> float:
    """Bytes of memory of this machine; infinite where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except AttributeError:  # Windows
        return float("inf")
