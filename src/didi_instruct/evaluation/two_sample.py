"""Two-sample test: can a fresh classifier tell two sets of samples apart?

It needs no likelihood, so it serves for any sampler. The classifier learns from some samples of
both sets and is scored on others. An AUC of 0.5 is what equal laws give, whatever it learned; an
AUC above it is a difference that is really there. The reverse does not hold: a difference may be
beyond a small classifier, or need more samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import OptimConfig
from didi_instruct.evaluation.ar_bound import Split, apply, check_tokens, fit, seeded_weights
from didi_instruct.models.dit import Trunk
from didi_instruct.models.layers import LayerNorm

AT_ONCE = 1 << 24
"""Numbers in the largest tensor of a forward pass."""


@dataclass(frozen=True, slots=True)
class TwoSample:
    """How well held-out samples are told apart: 0.5 is not at all, 1 is always."""

    auc: float
    """Chance that a sample of A scores above one of B, ties counted half."""
    auc_ci95: tuple[float, float]
    """DeLong's interval over held-out samples, for the classifier as it was trained."""
    accuracy: float
    """Mean of the shares of A and of B that are recognised."""
    train: int
    valid: int
    held_out: int
    """Samples of each split, A and B together."""
    best_step: int
    """Step of training whose classifier was kept."""


class Classifier(Trunk):
    """A bidirectional trunk and a small head: the mean over positions of a logit, A over B."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head = nn.Sequential(
            LayerNorm(config.hidden),
            nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, 1),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of texts: (B, L) -> (B,)."""
        logits: Tensor = self.head(self.trunk(tokens))
        return logits.squeeze(-1).mean(1)
