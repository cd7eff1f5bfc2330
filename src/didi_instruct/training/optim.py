"""AdamW, learning-rate schedules, the moving average, and the update of one network."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from didi_instruct.config.train import OptimConfig
from didi_instruct.models.discriminator import flat_name
from didi_instruct.training.distributed import local, whole


class EMA:
    """Moving averages, in float32, of all parameters of a model; sharded (FSDP2) as they are."""

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True) -> None:
        self.model, self.decay, self.warmup = model, decay, warmup
        self.shadow: dict[str, Tensor] = {
            name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the parameters after update `step` (from 0).

        s ← d·s + (1 − d)·p with d = min(decay, (1 + step) / (10 + step)): a constant 0.9999, which
        it is without warm-up, is still 94% of the starting point after 600 steps.
        """
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        shadows = [local(s) for s in self.shadow.values()]
        values = [local(p.detach()).float() for p in self.model.parameters()]
        torch._foreach_lerp_(shadows, values, 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the parameters of a model of the same kind with the averages."""
        _copy(model.parameters(), self.shadow.values())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages inside the block; the model's own parameters are back after it."""
        own = [p.detach().clone() for p in self.model.parameters()]
        try:
            self.copy_to(self.model)
            yield
        finally:
            with torch.no_grad():
                _copy(self.model.parameters(), own)


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy parameters; a sharded average may go into a whole model."""
    for target, source in zip(targets, sources, strict=True):
        sharded = isinstance(target, DTensor)
        local(target).copy_(local(source) if sharded else whole(source))


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) out of `steps`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.final + (1.0 - config.final) * left)


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

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        steps: int,
        ema: float,
        *,
        ema_warmup: bool = True,
    ) -> None:
        self.model, self.config, self.steps = model, config, steps
        self.optimizer = make_optimizer(model, config)
        self.ema = EMA(model, decay=ema, warmup=ema_warmup) if ema else None
        # Moments exist from the start: a checkpoint may be made, or loaded, before an update.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def update(self, step: int) -> Tensor:
        """Apply the gradients of step `step` and clear them; return their norm."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(step)
        return whole(norm)

    def tensors(self) -> dict[str, Tensor]:
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
