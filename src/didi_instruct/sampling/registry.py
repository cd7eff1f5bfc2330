"""Samplers by name: the models they are for, their options, and how they are called."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from didi_instruct.config.methods import DIMO_NOISE, DIMO_RANDOM
from didi_instruct.config.model import Kind, ModelConfig, Order
from didi_instruct.config.schema import Fraction, nearest, parse
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.confidence import by_confidence
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.dimo import Start, dimo
from didi_instruct.sampling.dplm import Proposal, dplm
from didi_instruct.sampling.engines.cuda import Decoders
from didi_instruct.sampling.guide import Guidance, Guide
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import Samples, State
from didi_instruct.sampling.uniform_state import uniform_state
from didi_instruct.sampling.variants import Strategy, blocks, first_hitting, remasking

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

USUAL_STEPS = 16
"""Steps where no number is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledModel:
    """A model as samplers see it, its weights as they are now."""

    network: nn.Module
    config: ModelConfig
    tokenizer: Tokenizer | None
    schedule: Schedule
    denoiser: Denoiser | None
    """None: a left-to-right model."""
    guide: Guide | None = None
    decoders: Decoders | None = None
    """Captured passes of a left-to-right model."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.network.parameters()).device

    @property
    def eot_id(self) -> int | None:
        """Id that ends a text, if any does."""
        if self.config.end_id is None and self.tokenizer is not None:
            return self.tokenizer.eot_id
        return self.config.end_id

    def reverse(self, state: State) -> tuple[Denoiser, Schedule, State]:
        """First arguments of every sampler of a masked or uniform-state process."""
        assert self.denoiser is not None
        return self.denoiser, self.schedule, state


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Options of samplers that have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AncestralOptions:
    """Options of `ancestral`."""

    grid: str | tuple[float, ...] | None = None
    """`uniform` (the default), `cosine`, or steps + 1 times falling from 1 to 0."""
    order: Order | None = None
    """`random`, or `streams`: each step reveals positions apart from each other, by a grid of its
    own. None: the model's own order."""
    greedy_tail: bool = False
    """Take the most probable tokens in the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidedOptions(Guidance):
    """Options of `rgas`."""

    grid: str | tuple[float, ...] | None = None
    order: Order | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedOptions:
    """Options of `confidence`, `entropy` and `margin`."""

    threshold: float | None = None
    """Keep all that pass it, instead of an even share per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemaskingOptions:
    """Options of `remasking`."""

    eta: float = 0.05
    """Probability that a written token is masked again."""
    strategy: Strategy = "cap"
    """`cap`: at most eta; `rescale`: eta times the most that is possible."""
    grid: str | tuple[float, ...] = "uniform"
    greedy_tail: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """Options of `blocks`."""

    block_length: int = 32
    """Tokens finished before the next begin; each block takes `steps` steps."""
    inner: Literal["ancestral", "confidence", "entropy", "margin"] = "ancestral"
    """Sampler within a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DimoOptions:
    """Options of `dimo`: the start that a student was distilled with."""

    random: Fraction = DIMO_RANDOM
    """Share of the masks that are random tokens instead."""
    noise: Fraction = DIMO_NOISE
    """Share of Gaussian noise in their embeddings."""
    grid: str | tuple[float, ...] = "uniform"


@dataclass(frozen=True, kw_only=True, slots=True)
class DplmOptions:
    """Options of `dplm`."""

    draw: Proposal = "sample"
    """Proposals of tokens: `sample`, by Gumbel noise at the temperature, or `argmax`."""
    guard: float | None = None
    """Share of a text above which a token is drawn again, by an extra pass; DPLM's is 0.25."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TailOptions:
    """Options of `uniform-state`."""

    grid: str | tuple[float, ...] = "uniform"
    greedy_tail: bool = False
    """Take the most probable tokens in the last step."""


Run = Callable[[SampledModel, State, int | None, Any], Samples]
"""Draw a batch: model, texts, steps (None: the usual number), options."""


def _plain(sampler: Callable[..., Samples]) -> Run:
    """Call a sampler of a denoiser, a schedule and a state, with its options by name."""

    def run(model: SampledModel, state: State, steps: int | None, options: Any) -> Samples:
        return sampler(*model.reverse(state), steps=steps or USUAL_STEPS, **asdict(options))

    return run


def _ordered(order: str) -> Run:
    def run(
        model: SampledModel, state: State, steps: int | None, options: OrderedOptions
    ) -> Samples:
        denoiser, threshold = model.reverse(state)[0], options.threshold
        if threshold is None:
            return by_confidence(denoiser, state, steps=steps or USUAL_STEPS, order=order)
        if steps is not None:
            raise UserError("A threshold decides the number of steps: leave out steps.")
        return by_confidence(denoiser, state, order=order, threshold=threshold)

    return run


def _guided(model: SampledModel, state: State, steps: int | None, given: GuidedOptions) -> Samples:
    denoiser, schedule, _ = model.reverse(state)
    return rgas(
        denoiser,
        schedule,
        model.guide,
        state,
        steps=steps or USUAL_STEPS,
        guidance=given,
        grid=given.grid,
        order=given.order or "random",
    )


def _blocks(model: SampledModel, state: State, steps: int | None, given: BlockOptions) -> Samples:
    settings = asdict(given) | {"steps": steps or USUAL_STEPS, "order": model.config.order}
    return blocks(*model.reverse(state), **settings)


def _first_hitting(
    model: SampledModel, state: State, steps: int | None, given: NoOptions
) -> Samples:
    return first_hitting(*model.reverse(state))


def _dimo(model: SampledModel, state: State, steps: int | None, given: DimoOptions) -> Samples:
    network, start = cast("Network", model.network), Start(given.random, given.noise)
    steps = steps or USUAL_STEPS
    return dimo(network, model.schedule, state, steps=steps, start=start, grid=given.grid)


def _dplm(model: SampledModel, state: State, steps: int | None, given: DplmOptions) -> Samples:
    return dplm(model.reverse(state)[0], state, steps=steps or USUAL_STEPS, **asdict(given))


def _autoregressive(
    model: SampledModel, state: State, steps: int | None, given: NoOptions
) -> Samples:
    assert isinstance(model.network, ARModel)
    return autoregressive(model.network, state, eot_id=model.eot_id, decoders=model.decoders)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler by name: one entry of `SAMPLERS`."""

    name: str
    kind: Kind
    """Kind of the models that it samples."""
    options: type
    run: Run
    help: str
    counts_tokens: bool = False
    """Takes one step for each token; refuses a number of steps."""
    follows_order: bool = False
    """Reveals positions in the model's order, unless its options name another."""
    needs_guide: bool = False
    """Needs a discriminator."""
    one_mask: bool = False
    """Refuses models with several masks."""

    def __call__(
        self, model: SampledModel, state: State, steps: int | None, options: Mapping[str, Any]
    ) -> Samples:
        """Draw a batch; `options` are by name, and checked."""
        if self.counts_tokens and steps is not None:
            raise UserError(f"`{self.name}` takes a step per token: leave out steps.")
        parsed = self.parse(options, model.config.order)
        if self.one_mask and state.canvas.masks > 1:
            raise UserError(f"`{self.name}` is for models with one mask: use ancestral.")
        return self.run(model, state, steps, parsed)

    def parse(self, options: Mapping[str, Any], order: Order = "random") -> Any:
        """Check options by name; what they leave open follows from the model's order."""
        if options and not fields(self.options):
            raise UserError(f"`{self.name}` has no options.")
        parsed: Any = parse(self.options, dict(options), where=f"sampler {self.name}")
        if not self.follows_order:
            return parsed
        order = parsed.order or order
        grid = "uniform" if parsed.grid is None and order == "random" else parsed.grid
        return replace(parsed, order=order, grid=grid)

    def all_options(self, options: Mapping[str, Any], order: Order) -> dict[str, Any]:
        """Return all options, defaults included, as JSON values."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self.parse(options, order))))
        return told

    def fits(self, config: ModelConfig, *, has_discriminator: bool) -> bool:
        """Return True if it can sample a model."""
        return (
            self.kind == config.kind
            and (has_discriminator or not self.needs_guide)
            and (config.masks == 1 or not self.one_mask)
        )


_ALL = (
    Sampler("ancestral", "mdlm", AncestralOptions, _plain(ancestral),
            "the reverse process; the default", follows_order=True),
    Sampler("rgas", "mdlm", GuidedOptions, _guided,
            "Algorithm 2: tilting by the discriminator's gradient, then re-ranking",
            follows_order=True, needs_guide=True),
    Sampler("confidence", "mdlm", OrderedOptions, _ordered("confidence"),
            "the surest tokens first"),
    Sampler("entropy", "mdlm", OrderedOptions, _ordered("entropy"), "the surest tokens first"),
    Sampler("margin", "mdlm", OrderedOptions, _ordered("margin"), "the surest tokens first"),
    Sampler("remasking", "mdlm", RemaskingOptions, _plain(remasking),
            "written tokens may be masked again (ReMDM)"),
    Sampler("blocks", "mdlm", BlockOptions, _blocks, "left to right in blocks"),
    Sampler("first-hitting", "mdlm", NoOptions, _first_hitting, "exact, one token at a time",
            counts_tokens=True),
    Sampler("dimo", "mdlm", DimoOptions, _dimo,
            "from a start that is partly random, for students of `--method dimo`", one_mask=True),
    Sampler("dplm", "mdlm", DplmOptions, _dplm,
            "DPLM's decoder: tokens are proposed everywhere, the least certain masked again"),
    Sampler("uniform-state", "duo", TailOptions, _plain(uniform_state),
            "the reverse process of uniform-state models"),
    Sampler("autoregressive", "ar", NoOptions, _autoregressive,
            "left-to-right models, token by token", counts_tokens=True),
)  # fmt: skip
SAMPLERS = {sampler.name: sampler for sampler in _ALL}
PLAIN = {"mdlm": "ancestral", "duo": "uniform-state", "ar": "autoregressive"}


def find_sampler(name: str | None, kind: Kind) -> Sampler:
    """Return a sampler by name, by default the plain one of a kind of models."""
    name = PLAIN[kind] if name is None else name
    if name not in SAMPLERS:
        raise UserError(f"`{name}` is not a sampler.{nearest(name, list(SAMPLERS))}")
    sampler = SAMPLERS[name]
    if sampler.kind != kind:
        fitting = ", ".join(s.name for s in SAMPLERS.values() if s.kind == kind)
        raise UserError(f"`{name}` does not sample models of kind {kind}. Those do: {fitting}.")
    return sampler
