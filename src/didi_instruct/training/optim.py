"""AdamW, the learning-rate schedules, and the update of one network with its average."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.models.ema import EMA


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
        named = dict(self.model.named_parameters())
        result = {f"model/{name}": p.detach() for name, p in named.items()}
        result |= {f"buffer/{name}": b for name, b in self.model.named_buffers()}
        if self.ema is not None:
            result |= {f"ema/{name}": t for name, t in self.ema.shadow.items()}
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
