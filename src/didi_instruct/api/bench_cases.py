"""The rows of `didi bench`: a model's sampler, its floor, and what it is told against."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from didi_instruct.api.bench_plan import BenchPlan
from didi_instruct.benchmarking.sampling import ar_case, floor_case, naive_case, transformers_case
from didi_instruct.benchmarking.timing import TOO_LARGE, Case
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.models.ar import ARModel
from didi_instruct.sampling.engines.cuda import why_not
from didi_instruct.sampling.registry import GuidedOptions, Sampler, find_sampler

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

HOST_BYTES = 40
"""Of the CPU's memory that any sampler takes per token: a list of ids, and a few numbers of 8
bytes each."""


def make_cases(model: Model, others: Mapping[str, Model], plan: BenchPlan) -> list[Case]:
    """What to time, in order; one that is too large to be built fails when it is run."""
    length = text_length(model, others, plan)
    ours = Sampling(plan.row, model, plan, length)
    if plan.steps is not None and ours.sampler.counts_tokens:
        raise UserError(f"`{ours.sampler.name}` takes a step per token: leave out --steps.")
    try:
        start = _start(model, plan.batch, length)
    except TOO_LARGE as error:
        return [Case.impossible(plan.row, plan.batch, length, ours.steps, error)]
    cases = [ours.case()]
    if not isinstance(model.network, ARModel):
        fast = model.is_accelerated
        cases.append(
            floor_case(cast("Network", model.network), start, lambda: ours.steps, fast=fast)
        )
    for name in plan.against:
        if name == "plain":
            twin = Model(model.network, model.config, discriminator=model.discriminator)
            cases.append(Sampling(name, twin, replace(plan, fast=False), length).case())
        elif name == "naive":
            cases.append(_naive(model, plan, start))
        elif name in ("ar", "transformers"):
            cases.append(_left_to_right(name, model, plan, start[:, :length]))
        else:
            cases.append(Sampling(name, others[name], plan, length).case())
    # Where a text has a window of its own, its end is read too, but not written.
    return [replace(case, length=length) for case in cases]


def text_length(model: Model, others: Mapping[str, Model], plan: BenchPlan) -> int:
    """Tokens of a text, which all models have to be able to write."""
    length = model.config.length if plan.length is None else plan.length
    for name, each in {plan.row: model, **others}.items():
        most = each.config.length
        if most < length and plan.length is not None:
            raise UserError(f"--length is {length}: {name} writes 1 to {most} tokens.")
        if most < length:
            raise UserError(
                f"{plan.row} writes {length} tokens, and {name} up to {most}: add --length {most}."
            )
    return length


class Sampling:
    """What `didi generate` does."""

    def __init__(self, name: str, model: Model, plan: BenchPlan, length: int) -> None:
        self.name, self.model, self.plan, self.length = name, model, plan, length
        self.sampler = _find_sampler(name, plan.wanted_sampler, model)
        self.steps = length if self.sampler.counts_tokens else plan.wanted_steps
        """As expected, until a run has told."""

    def __call__(self, seed: int) -> int:
        """Sample; return the steps that took."""
        samples = self.model.draw(
            self.plan.batch,
            steps=None if self.sampler.counts_tokens else self.plan.wanted_steps,
            length=self.length,
            sampler=self.sampler.name,
            seed=seed,
            batch_size=self.plan.batch,
            measure_path=False,
        )
        self.steps = samples.nfe
        return self.steps

    def case(self) -> Case:
        """To time it."""
        critic = self.model.discriminator if self.sampler.name == "rgas" else None
        networks = (self.model.network,) if critic is None else (self.model.network, critic)
        return Case(
            name=self.name, run=self, batch=self.plan.batch, length=self.length, steps=self.steps,
            networks=networks, note=remark(self.model, self.plan),
        )  # fmt: skip


def _find_sampler(name: str, sampler: str | None, model: Model) -> Sampler:
    try:
        return find_sampler(sampler, model.config.kind)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def remark(model: Model, plan: BenchPlan) -> str | None:
    """How a row differs from the others, where it could not be helped."""
    remarks = []
    left_to_right = model.config.kind == "ar"
    if model.device.type == "cuda" and plan.fast is not False and not model.is_accelerated:
        remarks.append(f"neither compiled nor captured ({why_not(model.network)})")
    if left_to_right and (model.config.end_id is not None or model.tokenizer is not None):
        remarks.append("texts that end early count in full")
    return "; ".join(remarks) or None


def _naive(model: Model, plan: BenchPlan, start: Tensor) -> Case:
    config, sampler = model.config, plan.wanted_sampler
    if config.kind != "mdlm":
        raise UserError(f"`naive` is masked diffusion, and this model is {config.kind}.")
    if config.masks > 1 or sampler not in (None, "ancestral", "rgas"):
        raise UserError("`naive` knows models with one mask, and the samplers ancestral and rgas.")
    guided = sampler == "rgas"
    return naive_case(
        cast("Network", model.network),
        model.schedule,
        start,
        model.mask_symbol,
        plan.wanted_steps,
        model.discriminator if guided else None,
        GuidedOptions() if guided else None,
        config.order,
    )


def _left_to_right(name: str, model: Model, plan: BenchPlan, start: Tensor) -> Case:
    make = ar_case if name == "ar" else transformers_case
    fast = plan.fast is not False and start.is_cuda
    dtype = next(model.network.parameters()).dtype
    try:
        return make(model.config, start, dtype, fast=fast)
    except (*TOO_LARGE, ImportError) as error:
        batch, length = start.shape
        return Case.impossible(name, batch, length, length, error)


def _start(model: Model, batch: int, length: int) -> Tensor:
    """(B, L) masks, as many as are to be written; where texts have windows, their ends too."""
    config = model.config
    if batch * length * HOST_BYTES > _host_memory():  # the system would end us without a word
        raise MemoryError(f"{batch} texts of {length} tokens do not fit into memory")
    symbol = 0 if config.kind == "duo" else model.mask_symbol
    start = torch.full((batch, length), symbol, device=model.device)
    if config.end_id is None or config.kind != "mdlm":
        return start
    return torch.nn.functional.pad(start, (0, config.length - length), value=config.end_id)


def _host_memory() -> float:
    """Bytes that this machine has, if it says so."""
    if not hasattr(os, "sysconf"):
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
