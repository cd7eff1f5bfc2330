"""The quick look for uniform-state samplers, whose paths have no probability: judge and variety.

A text can be reached along many paths, so there is no path KL. What a judge thinks of the samples
falls when they lose variety, too: their entropy belongs beside it, always.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from didi_instruct.distillation.watch import unique_ngrams
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.quick import LAW_ENTRIES, ROWS, QuickTest, nothing
from didi_instruct.sampling.denoiser import Logits, LogitsDenoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, Samples, State, join
from didi_instruct.sampling.uniform_state import uniform_state
from didi_instruct.training.likelihood import perplexity


@dataclass(frozen=True, slots=True)
class UniformQuickTest(QuickTest):
    """Settings of the draws and their judge; `mask_id` is V, which marks positions to write."""

    def draw(
        self, logits: Logits, steps: int, tick: Callable[[], None] = nothing, *_: Any, **__: Any
    ) -> Samples:
        """Ancestral samples from a denoiser; `tick` is called between batches.

        What there is to say of masks has no meaning here.
        """
        denoiser, parts = LogitsDenoiser(logits, self.mask_id), []
        size = max(1, min(ROWS, LAW_ENTRIES // (self.start.shape[1] * self.mask_id)))
        for first in range(0, len(self.start), size):
            tick()
            tokens = self.start[first : first + size]
            indices = torch.arange(first, first + len(tokens), device=tokens.device)
            canvas = Canvas(tokens, self.mask_id, indices)
            state = State(canvas, DrawOptions(seed=self.seed))
            parts.append(uniform_state(denoiser, self.schedule, state, steps=steps))
        return join(parts)

    def measure(
        self, logits: Logits, tag: str = "", tick: Callable[[], None] = nothing, *_: Any, **__: Any
    ) -> dict[str, float]:
        """Numbers of a denoiser at every budget, by name."""
        found: dict[str, float] = {}
        for steps in self.budgets:
            tokens = self.draw(logits, steps, tick).tokens
            end = f"{steps}{tag}"
            if self.judge is not None:
                nats = -self.judge(tokens).double().cpu() / tokens.shape[1]
                found[f"judge_nats_{end}"] = nats.mean().item()
                found[f"judge_nats_{end}_se"] = nats.std().item() / math.sqrt(len(nats))
                found[f"judge_ppl_{end}"] = perplexity(nats.mean().item())
            found[f"entropy_{end}"] = unigram_entropy(tokens.cpu()).mean().item()
            visible = torch.ones_like(tokens, dtype=torch.bool)
            found[f"unique_4gram_{end}"] = unique_ngrams(tokens, visible).item()
            if self.also is not None:
                found |= {f"{name}_{end}": value for name, value in self.also(tokens).items()}
        return found
