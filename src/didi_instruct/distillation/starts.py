"""Where texts start: what they are given, and what is left to write.

Usually nothing is given, one row of masks for all. A prompt gives the first tokens. Where each text
has a window of its own, its end is given too: that of the text whose prompt it continues, or one of
a length drawn from the teacher's law.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation.rollout import Noise
from didi_instruct.process.masking import LengthLaw, before_end, window
from didi_instruct.sampling.draw import Purpose

REPRESENTATIVE_LENGTHS = 8
"""Lengths of windows that stand for all in a number of the log."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of texts of one length of window and one length of prompt."""

    mask_id: int
    length: int
    prompt: int = 0
    end_id: int | None = None
    """The id that fills a window behind its text; None: texts fill their windows."""
    law: LengthLaw | None = None
    """With `end_id`: how long texts are."""

    @classmethod
    def of(cls, model: ModelConfig, length: int, prompt: int) -> "Starts":
        """Starts of a model's texts; where it has no mask, the id V marks what is to be written."""
        law = None if model.end_id is None else LengthLaw(model.lengths)
        return cls(model.num_tokens, length, prompt, model.end_id, law)

    @property
    def shared(self) -> bool:
        """True where all texts start from one row."""
        return not self.prompt and self.law is None

    def open(self, rows: Tensor) -> Tensor:
        """Positions of texts (B, L) that are written, not given: after the prompt, before the end.

        None, where a text is no longer than its prompt.
        """
        after = torch.arange(self.length, device=rows.device) >= self.prompt
        if self.end_id is None:
            return after.expand(rows.shape)
        return after & before_end(rows, self.end_id)

    def __call__(
        self, noise: Noise, rows: Tensor | None = None, group: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Distinct starts (U, L) of the texts of some noise, and the start of each text: (B,).

        `rows` (R, L) are the texts whose prompts are continued, each by B / R in turn; without
        prompts they are not used. Of drawn lengths, each `group` of texts has one.
        """
        text = torch.arange(len(noise.indices), device=noise.device)
        if self.prompt:
            assert rows is not None, "prompts come from texts"
            return self.of_rows(rows), text // (len(text) // len(rows))
        if self.law is None:
            return self.representative(text.device), torch.zeros_like(text)
        drawn = self._lengths(noise.of_groups(group))
        lengths, which = torch.unique(drawn, return_inverse=True)
        return self._windows(lengths), which[text // group]

    def of_rows(self, rows: Tensor) -> Tensor:
        """Texts (B, L) before anything is written."""
        return torch.where(self.open(rows), self.mask_id, rows)

    def log_prob(self, start: Tensor) -> Tensor:
        """Log-probability of drawing the starts (B, L): (B,) float64, 0 without a law."""
        if self.law is None or self.prompt:
            return torch.zeros(len(start), dtype=torch.float64, device=start.device)
        return self.law.log_prob((start == self.mask_id).sum(1))

    def representative(self, device: torch.device) -> Tensor:
        """Starts without a prompt that stand for all: one row, or windows from short to long."""
        if self.law is None:
            return torch.full((1, self.length), self.mask_id, device=device)
        count = REPRESENTATIVE_LENGTHS
        middle = torch.arange(count, dtype=torch.float64, device=device) + 0.5
        return self._windows(self.law.draw(middle / count))

    def _lengths(self, noise: Noise) -> Tensor:
        assert self.law is not None
        return self.law.draw(noise.uniforms(1, Purpose.LENGTH).squeeze(1))

    def _windows(self, lengths: Tensor) -> Tensor:
        assert self.end_id is not None
        return window(self.length, self.mask_id, self.end_id, lengths)
