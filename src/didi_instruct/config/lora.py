"""Settings of low-rank adapters."""

from dataclasses import dataclass

from didi_instruct.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (LoRA) on the blocks of a frozen network, in place of its weights."""

    rank: int = 0
    """Of each adapter; 0: no adapters, all weights learn."""
    alpha: float | None = None
    """An adapter's output is multiplied by alpha / rank; by default alpha is twice the rank."""
    targets: tuple[str, ...] = ()
    """Linear layers of each block that have an adapter, by the last part of their names (`q_proj`);
    by default all."""
    checkpointing: bool = True
    """For gradients, keep only what enters each block, and compute the rest again."""

    def __post_init__(self) -> None:
        """Refuse ranks and weights that mean nothing."""
        if self.rank < 0:
            raise UserError(f"lora.rank is {self.rank}: use 1 or more, or 0 for no adapters.")
        if self.alpha is not None and not self.alpha > 0:
            raise UserError(f"lora.alpha is {self.alpha}: use a number above 0.")
        if self.targets and not self.rank:
            raise UserError("lora.targets are set, but lora.rank is 0: give a rank.")

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return 2.0 if self.alpha is None else self.alpha / self.rank
