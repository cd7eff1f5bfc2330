"""Samplers by name: which models they are for, their options, how they are called."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from didi_instruct.config.methods import DIMO_NOISE, DIMO_RANDOM
from didi_instruct.config.model import Kind, Order
from didi_instruct.config.schema import nearest, parse
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
"""Where nobody names a number."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a model brings to a sampler."""

    network: nn.Module
    schedule: Schedule
    denoiser: Denoiser | None
    """None: a left-to-right model."""
    guide: Guide | None
    eot_id: int | None
    order: Order = "random"
    """In which positions are revealed, where nobody says."""
    decoders: Decoders | None = None
    """Captured passes of a left-to-right model."""


@dataclass(frozen=True, slots=True)
class Call:
    """One batch for a sampler."""

    engine: Engine
    state: State
    wanted: int | None
    """Steps asked for; None: the usual number."""

    @property
    def steps(self) -> int:
        """Steps to take."""
        return USUAL_STEPS if self.wanted is None else self.wanted

    @property
    def denoiser(self) -> Denoiser:
        """Of a model that is not left to right."""
        assert self.engine.denoiser is not None
        return self.engine.denoiser

    @property
    def reverse(self) -> tuple[Denoiser, Schedule, State]:
        """What every sampler of a masked or uniform-state process begins with."""
        return self.denoiser, self.engine.schedule, self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Nothing to set."""


class _Revealing:
    """Options that say which positions a step reveals."""

    __slots__ = ()

    def resolve(self, order: Order) -> Any:
        """The same with nothing left open, for a model with an order of its own."""
        options: Any = self
        order = options.order or order
        grid = "uniform" if options.grid is None and order == "random" else options.grid
        return replace(options, order=order, grid=grid)


@dataclass(frozen=True, kw_only=True, slots=True)
class AncestralOptions(_Revealing):
    """Options of `ancestral`."""

    grid: str | tuple[float, ...] | None = None
    """`uniform` (the default), `cosine`, or steps + 1 times falling from 1 to 0."""
    order: Order | None = None
    """`random`, or `streams`: each step reveals positions apart from each other, by a grid of its
    own. None: the model's own order."""
    greedy_tail: bool = False
    """Take the most probable tokens in the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidedOptions(Guidance, _Revealing):
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
    """How much is masked again."""
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
    """How a block is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DimoOptions:
    """Options of `dimo`: the start that a student was distilled with."""

    random: float = DIMO_RANDOM
    """Share of the masks that are random tokens instead."""
    noise: float = DIMO_NOISE
    """Share of Gaussian noise in their embeddings."""
    grid: str | tuple[float, ...] = "uniform"

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        for name in ("random", "noise"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use 0 or more, below 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DplmOptions:
    """Options of `dplm`."""

    draw: Proposal = "sample"
    """How tokens are proposed: `sample`, by Gumbel noise at the temperature, or `argmax`."""
    guard: float | None = None
    """Share of a text above which a token is drawn again, by an extra pass; DPLM's is 0.25."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TailOptions:
    """Options of `uniform-state`."""

    grid: str | tuple[float, ...] = "uniform"
    greedy_tail: bool = False
    """Take the most probable tokens in the last step."""


def _ancestral(call: Call, options: AncestralOptions) -> Samples:
    options = options.resolve(call.engine.order)
    return ancestral(*call.reverse, steps=call.steps, **asdict(options))


def _guided(call: Call, options: GuidedOptions) -> Samples:
    options = options.resolve(call.engine.order)
    return rgas(
        call.denoiser,
        call.engine.schedule,
        call.engine.guide,
        call.state,
        steps=call.steps,
        guidance=options,
        grid=options.grid,
        order=options.order or "random",
    )


def _ordered(order: str) -> Callable[[Call, OrderedOptions], Samples]:
    def run(call: Call, options: OrderedOptions) -> Samples:
        steps: int | None = call.steps
        if options.threshold is not None:
            if call.wanted is not None:
                raise UserError("A threshold decides the number of steps: leave out steps.")
            steps = None
        given = call.denoiser, call.state
        return by_confidence(*given, steps=steps, order=order, threshold=options.threshold)

    return run


def _remasking(call: Call, options: RemaskingOptions) -> Samples:
    return remasking(*call.reverse, steps=call.steps, **asdict(options))


def _blocks(call: Call, options: BlockOptions) -> Samples:
    order = call.engine.order
    return blocks(*call.reverse, steps=call.steps, order=order, **asdict(options))


def _first_hitting(call: Call, options: NoOptions) -> Samples:
    return first_hitting(*call.reverse)


def _dimo(call: Call, options: DimoOptions) -> Samples:
    if call.state.canvas.masks > 1:
        raise UserError("`dimo` is for models with one mask: use ancestral.")
    start = Start(options.random, options.noise)
    network, schedule = cast("Network", call.engine.network), call.engine.schedule
    return dimo(network, schedule, call.state, steps=call.steps, start=start, grid=options.grid)


def _dplm(call: Call, options: DplmOptions) -> Samples:
    return dplm(call.denoiser, call.state, steps=call.steps, **asdict(options))


def _uniform_state(call: Call, options: TailOptions) -> Samples:
    return uniform_state(*call.reverse, steps=call.steps, **asdict(options))


def _autoregressive(call: Call, options: NoOptions) -> Samples:
    engine, network = call.engine, call.engine.network
    assert isinstance(network, ARModel)
    return autoregressive(network, call.state, eot_id=engine.eot_id, decoders=engine.decoders)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler by name."""

    name: str
    kind: Kind
    options: type
    run: Callable[[Call, Any], Samples]
    counts_tokens: bool = False
    """Whether it takes as many steps as there are tokens, whatever is asked for."""

    def __call__(self, call: Call, options: Mapping[str, Any]) -> Samples:
        """Run with options by name, checked."""
        if self.counts_tokens and call.wanted is not None:
            raise UserError(f"`{self.name}` takes a step per token: leave out steps.")
        if options and not fields(self.options):
            raise UserError(f"`{self.name}` has no options.")
        parsed: Any = parse(self.options, dict(options), where=f"sampler {self.name}")
        return self.run(call, parsed)


SAMPLERS = {
    s.name: s
    for s in (
        Sampler("ancestral", "mdlm", AncestralOptions, _ancestral),
        Sampler("rgas", "mdlm", GuidedOptions, _guided),
        Sampler("confidence", "mdlm", OrderedOptions, _ordered("confidence")),
        Sampler("entropy", "mdlm", OrderedOptions, _ordered("entropy")),
        Sampler("margin", "mdlm", OrderedOptions, _ordered("margin")),
        Sampler("remasking", "mdlm", RemaskingOptions, _remasking),
        Sampler("blocks", "mdlm", BlockOptions, _blocks),
        Sampler("first-hitting", "mdlm", NoOptions, _first_hitting, counts_tokens=True),
        Sampler("dimo", "mdlm", DimoOptions, _dimo),
        Sampler("dplm", "mdlm", DplmOptions, _dplm),
        Sampler("uniform-state", "duo", TailOptions, _uniform_state),
        Sampler("autoregressive", "ar", NoOptions, _autoregressive, counts_tokens=True),
    )
}
PLAIN = {"mdlm": "ancestral", "duo": "uniform-state", "ar": "autoregressive"}


def find_sampler(name: str | None, kind: Kind) -> Sampler:
    """Return the sampler of that name, or the plain one of a kind of model."""
    name = PLAIN[kind] if name is None else name
    if name not in SAMPLERS:
        raise UserError(f"`{name}` is not a sampler.{nearest(name, list(SAMPLERS))}")
    sampler = SAMPLERS[name]
    if sampler.kind != kind:
        fitting = ", ".join(s.name for s in SAMPLERS.values() if s.kind == kind)
        raise UserError(f"`{name}` does not sample models of kind {kind}. Those do: {fitting}.")
    return sampler
