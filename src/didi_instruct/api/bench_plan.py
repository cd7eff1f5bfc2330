"""What `didi bench` is asked to time, and the models that takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from didi_instruct.benchmarking.sampling import fill
from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.config.parse import parse
from didi_instruct.errors import UserError
from didi_instruct.model import Model, dtype_of, load
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT, build_model
from didi_instruct.sampling.engines.cuda import why_not
from didi_instruct.sampling.registry import USUAL_STEPS
from didi_instruct.training.distributed import pick_device

RIVALS = ("plain", "naive", "ar", "transformers")
"""Rows that are no models of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to time."""

    source: str | None = None
    arch: str | None = None
    """A named architecture with random weights, instead of a source."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the architecture that differ."""
    against: tuple[str, ...] = ()
    """Further rows: `plain` (ours, neither compiled nor captured), `naive`, `ar`, `transformers`,
    other sources."""
    batch: int = 16
    length: int | None = None
    """Tokens of a text; by default all that the model reads."""
    steps: int | None = None
    """Steps of a sampler, by default the usual number; some take as many as there are tokens."""
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
        if self.dtype is not None:
            dtype_of(self.dtype)
        if self.guided and self.sampler not in (None, "rgas"):
            raise UserError(f"--guided samples by rgas: leave out --sampler {self.sampler}.")

    @property
    def name(self) -> str:
        """The model in words."""
        return self.source or f"{self.arch} with random weights"

    @property
    def row(self) -> str:
        """The model as its row is called."""
        return self.source or str(self.arch)

    @property
    def wanted_steps(self) -> int:
        """Steps to take, by samplers that can be told."""
        return USUAL_STEPS if self.steps is None else self.steps

    @property
    def wanted_sampler(self) -> str | None:
        """By name; None: the plain one of each model."""
        return "rgas" if self.guided else self.sampler

    @property
    def config(self) -> ModelConfig:
        """Of the architecture, with what differs, checked, and room for the length."""
        assert self.arch is not None
        config = with_changes(architecture(self.arch), self.model)
        if self.length is not None and self.length > config.length:
            config = replace(config, length=self.length)
        return config


def with_changes(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """An architecture with some settings replaced, checked."""
    if not changes:
        return config
    known = {name: getattr(config, name) for name in ("layers", "hidden", "heads", "vocab_size")}
    return parse(ModelConfig, {**known, **changes}, where="--set")


def open_model(plan: BenchPlan) -> Model:
    """The model to time, accelerated where that is wanted and possible."""
    device = pick_device(plan.device)
    dtype = dtype_of(plan.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if plan.source is not None:
        model = load(plan.source, device=str(device), dtype=dtype)
    else:
        model = random_model(plan, device, dtype)
    if plan.wanted_sampler == "rgas" and model.discriminator is None:
        raise UserError(
            f"{plan.source} has no discriminator to guide it: distil with --method didi, sample "
            "without rgas, or use --arch NAME, whose weights are random."
        )
    if plan.fast or (plan.fast is None and why_not(model.network) is None):
        model.accelerate()
    return model


def open_others(plan: BenchPlan) -> dict[str, Model]:
    """The other sources of a plan by name, to be sampled as its own model is."""
    names = [name for name in plan.against if name not in RIVALS]
    return {name: open_model(replace(plan, source=name, arch=None, model={})) for name in names}


def random_model(plan: BenchPlan, device: torch.device, dtype: torch.dtype) -> Model:
    """A named architecture with random weights: speed does not depend on what they say."""
    config = plan.config
    torch.manual_seed(0)
    network = build_model(config)
    fill(network)
    critic = None
    if plan.wanted_sampler == "rgas":
        if not isinstance(network, DiT):
            raise UserError(f"rgas is for masked models, and {plan.arch} is {config.kind}.")
        critic = Discriminator.from_network(network).to(device, dtype)
    return Model(network.to(device, dtype), config, discriminator=critic)
