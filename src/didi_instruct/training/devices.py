"""What the settings of a run mean on a device: precision, compiling, the size of a pass."""

import torch

from didi_instruct.config.pretrain import TrainConfig

CPU_TOKENS = 8192
"""Tokens of a forward pass on a CPU, where a recipe does not say."""


def uses_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether forward passes run in bfloat16."""
    return config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether networks are compiled."""
    return config.compile == "on" or (config.compile != "off" and device.type == "cuda")
