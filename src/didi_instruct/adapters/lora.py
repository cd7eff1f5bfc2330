"""LoRA roles: networks that share the frozen weights of one, and learn adapters of their own.

Student, discriminator and auxiliary denoiser are `Adapted` networks; the teacher is the network
without adapters. Each role has modules of its own down to the leaves (linear layers, norms,
embeddings), which all roles share. So a role is part of what is computed, recomputation for
gradients included: nothing is switched, and passes of several roles may overlap in any order.
"""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import LoraConfig
from didi_instruct.errors import UserError
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.network import Mixture, Modulations, Network, NetworkRecord, all_logits
from didi_instruct.models.tensor_files import first_few
from didi_instruct.seeding import mix

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRecord:
    """How adapters were made: for their files."""

    lora: LoraConfig
    source: str
    """SOURCE of the base."""
    fingerprint: str
    """Of the base's weights."""


class Lora(nn.Module):
    """B A x times a factor, with A (rank, inputs) and B (outputs, rank)."""

    def __init__(self, inputs: int, outputs: int, config: LoraConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(config.rank, inputs))
        self.B = nn.Parameter(torch.zeros(outputs, config.rank))
        self.scale = config.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x.to(self.A.dtype), self.A), self.B) * self.scale

    @property
    def delta(self) -> Tensor:
        """Change of the layer's weight by the adapter, (outputs, inputs)."""
        return (self.B @ self.A) * self.scale


class LoraLinear(nn.Module):
    """A frozen linear layer plus an adapter, summed in the wider of their types."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.linear, self.lora = linear, lora

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return (y + self.lora(x)).to(y.dtype)


def shell(module: AnyModule) -> AnyModule:
    """Copy a tree of modules down to its leaves, which stay the same objects, as do all tensors."""
    if not module._modules:
        return module
    assert "forward" not in module.__dict__, "a patched `forward` would run the original's parts"
    twin = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        twin.__dict__[kind] = dict(module.__dict__[kind])
    parts = {name: part and shell(part) for name, part in module._modules.items()}
    twin.__dict__["_modules"] = parts
    return twin


class Adapted(nn.Module):
    """A role: `base` with adapters. Its parameters, and those of its checkpoints, are its own."""

    splits: bool = False
    reads_fill: bool = False
    codes: nn.Parameter | None
    _base: MaskedLM
    _network: MaskedLM

    def __init__(self, base: MaskedLM, blocks: nn.ModuleList, adapters: AdapterRecord) -> None:
        """`blocks` has a `Lora` for each adapted layer of each block, by its `layer_key`."""
        super().__init__()
        network = shell(base)
        for block, own in zip(network.blocks, blocks, strict=True):
            for key, lora in cast("nn.ModuleDict", own).items():
                linear = cast("nn.Linear", block.get_submodule(layer_path(key)))
                block.set_submodule(layer_path(key), LoraLinear(linear, cast("Lora", lora)))
            if adapters.lora.checkpointing:
                _compute_again(block)
        self.blocks, self.adapters = blocks, adapters
        self.register_parameter("codes", network.codes)
        # Not as modules: what is registered here is what learns, and is saved.
        self.__dict__["_base"], self.__dict__["_network"] = base, network
        self.train(base.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Adapted":
        """Adapters and codes of its own, on the same base."""
        base = self._base
        if self.codes is not None:
            base = shell(base)
            base.codes = copy.deepcopy(self.codes)
        return self._on(base)

    def _on(self, base: MaskedLM) -> "Adapted":
        twin = Adapted(base, copy.deepcopy(self.blocks), self.adapters)
        twin.config, twin.align = base.config, self.align
        return twin.train(self.training)

    # The protocol of networks

    @property
    def config(self) -> ModelConfig:
        return self._network.config

    @config.setter
    def config(self, config: ModelConfig) -> None:
        self._network.config = config

    @property
    def align(self) -> int:
        return self._network.align

    @align.setter
    def align(self, align: int) -> None:
        self._network.align = align

    @property
    def record(self) -> NetworkRecord | None:
        return self._network.record

    @property
    def vectors(self) -> Tensor:
        return self._network.vectors

    def embed(
        self, tokens: Tensor, attended: Tensor | None = None, mixture: Mixture | None = None
    ) -> Tensor:
        return self._network.embed(tokens, attended, mixture)

    def attention(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor | None:
        return self._network.attention(tokens, attended)

    def modulations(self, sigma: Tensor | float | None = None) -> Modulations | None:
        return None

    def constants(self) -> Modulations | None:
        return None

    def trunk(
        self,
        x: Tensor,
        mods: Modulations | None = None,
        attended: Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        return self._network.trunk(x, mods, attended, start, stop)

    def head(self, hidden: Tensor, mods: Modulations | None = None) -> Tensor:
        return self._network.head(hidden, mods)

    def without_head(self) -> "Adapted":
        return self._on(shell(self._base).drop_head())

    def with_masks(self, offsets: Tensor) -> "Adapted":
        return self._on(shell(self._base).add_masks(offsets))

    def forward(
        self, tokens: Tensor, sigma: Tensor | float | None = None, attended: Tensor | None = None
    ) -> Tensor:
        return all_logits(cast("Network", self), tokens, sigma, attended)

    # What modules do to all they hold; leaves of the base are met again and stay as they are

    def train(self, mode: bool = True) -> "Adapted":
        super().train(mode)
        self._network.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Adapted":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._network._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # Weights

    @property
    def prefix(self) -> str:
        """Path of the blocks in the network of `transformers`."""
        family = self._base.family
        return f"{family.trunk}.{family.blocks}"

    @torch.no_grad()
    def merged(self) -> MaskedLM:
        """The network with its adapters in its weights, as fast as the base; the rest is shared."""
        twin = shell(self._base)
        twin.config, twin.codes = self.config, self.codes
        for block, adapters in zip(twin.blocks, self.blocks, strict=True):
            for key, lora in cast("nn.ModuleDict", adapters).items():
                linear: Any = block.get_submodule(layer_path(key))
                weight = linear.weight.float() + cast("Lora", lora).delta.to(linear.weight.device)
                own = copy.copy(linear)
                own.__dict__["_parameters"] = dict(linear._parameters)
                own.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
                block.set_submodule(layer_path(key), own)
        return twin


def adapt(
    network: Network, config: LoraConfig, *, seed: int = 0, source: str = "", fingerprint: str = ""
) -> Adapted:
    """A network that begins as `network`, whose weights it shares and freezes.

    `source` and `fingerprint` are those of `network`.
    """
    if network.record is None:
        raise UserError(
            f"{source} is a network of didi's own, and adapters are for those of transformers: "
            "leave out lora.rank, and all of its weights learn."
        )
    base = cast("MaskedLM", shared(network))
    base.requires_grad_(False)
    found = adapted_layers(base, config)
    generator = torch.Generator().manual_seed(mix(seed, "lora"))
    blocks = nn.ModuleList(
        nn.ModuleDict({layer_key(n): _new(each, config, generator) for n, each in block.items()})
        for block in found
    )
    record = AdapterRecord(lora=config, source=source, fingerprint=fingerprint)
    return Adapted(base, blocks, record)


def shared(network: Network) -> Network:
    """A network with settings of its own, and the same weights."""
    return cast("Network", shell(cast("nn.Module", network)))


def adapted_layers(network: Network, config: LoraConfig) -> list[dict[str, nn.Linear]]:
    """Layers of each block that have an adapter, by their paths."""
    found = [layers(block) for block in network.blocks]
    return [_chosen(each, config.targets) for each in found] if config.targets else found


def layers(block: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers of a block by their paths, such as `self_attn.q_proj`."""
    return {path: each for path, each in block.named_modules() if isinstance(each, nn.Linear)}


def _chosen(found: dict[str, nn.Linear], targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Layers by the last parts of their names; each target has to name one or more."""
    names = {path.rpartition(".")[2] for path in found}
    if missing := [target for target in targets if target not in names]:
        raise UserError(
            f"lora.targets names {first_few(missing)}, which its blocks do not have: use some of "
            f"{', '.join(sorted(names))}, or leave it out for all."
        )
    return {path: each for path, each in found.items() if path.rpartition(".")[2] in targets}


def _new(linear: nn.Linear, config: LoraConfig, generator: torch.Generator) -> Lora:
    """An adapter that adds nothing yet: A is drawn as that of peft, B is 0."""
    lora = Lora(linear.in_features, linear.out_features, config)
    bound = linear.in_features**-0.5
    with torch.no_grad():
        lora.A.uniform_(-bound, bound, generator=generator)
    return lora


def layer_key(path: str) -> str:
    """Key of an adapted layer in its block's `ModuleDict`, which allows no dots."""
    return path.replace(".", "/")


def layer_path(key: str) -> str:
    """Path of an adapted layer in its block."""
    return key.replace("/", ".")


def _compute_again(block: nn.Module) -> None:
    """Let a block keep only its input for its gradient, and compute the rest again."""
    run = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    block.forward = forward
