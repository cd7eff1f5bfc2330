"""AdamW, learning-rate schedules, the moving average, and the update of one network."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.models.discriminator import flat_name


def warmed_up(decay: float, step: int) -> float:
    """Return the decay at `step` (from 0): min(decay, (1 + step) / (10 + step)).

    A constant 0.9999 would still be 94% of the starting point after 600 steps.
    """
    return min(decay, (1 + step) / (10 + step))


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor (DTensor), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if hasattr(source, "full_tensor") and not hasattr(target, "to_local"):
            source = source.full_tensor()  # a sharded average into a whole model
        _local(target).copy_(_local(source))


class EMA:
    """Shadow copies, in float32, of all parameters of a model.

    The copies of sharded parameters (FSDP2) are sharded alike, and are updated shard by shard.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: use 0 or more and less than 1")
        self.decay = decay
        self._model = model
        self.shadow: dict[str, Tensor] = {
            name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the shadow towards the parameters: s ← d·s + (1 − d)·p with d of `warmed_up`."""
        shadows = [_local(s) for s in self.shadow.values()]
        values = [_local(p.detach()).float() for p in self._matching(self._model)]
        torch._foreach_lerp_(shadows, values, 1 - warmed_up(self.decay, step))

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the parameters of a model with the averages."""
        _copy(self._matching(model), list(self.shadow.values()))

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Use the averages inside the block; the model's own parameters are back after it."""
        parameters = self._matching(model)
        own = [p.detach().clone() for p in parameters]
        try:
            self.copy_to(model)
            yield
        finally:
            with torch.no_grad():
                _copy(parameters, own)

    def _matching(self, model: nn.Module) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        if parameters.keys() != self.shadow.keys():
            differing = sorted(parameters.keys() ^ self.shadow.keys())
            raise ValueError(f"the average is of another model: {', '.join(differing[:3])}")
        return [parameters[name] for name in self.shadow]


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) out of `steps`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.final + (1.0 - config.final) * shape)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


class Updater:
    """Everything that changes one network: clipping, schedule, optimizer, moving average."""

    def __init__(self, model: nn.Module, config: OptimConfig, steps: int, ema: float) -> None:
        self.model, self.config, self.steps = model, config, steps
        self.optimizer = make_optimizer(model, config)
        self.ema = EMA(model, decay=ema) if ema else None

    def update(self, step: int) -> torch.Tensor:
        """Apply the gradients of step `step` and clear them; return their norm."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(step)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state by flat name: weights, average, optimizer moments."""
        named = {flat_name(name): p for name, p in self.model.named_parameters()}
        result = {f"model/{name}": p.detach() for name, p in named.items()}
        result |= {f"buffer/{flat_name(name)}": b for name, b in self.model.named_buffers()}
        if self.ema is not None:
            result |= {f"ema/{flat_name(name)}": t for name, t in self.ema.shadow.items()}
        for name, parameter in named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                result[f"optimizer/{key}/{name}"] = value
        return result

    def prepare_to_load(self) -> None:
        """Create the optimizer's moments, so that `tensors` lists all there is to fill."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
