"""A batch of texts on its way from masks to words, and where it starts and ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.masking import with_code
from didi_instruct.sampling.draw import PLAIN, DrawOptions, Noise

PAD = -1  # neither text nor mask is here: never attended, never written


@dataclass(frozen=True, slots=True)
class Canvas:
    """Start of a sampling: given tokens, and masks to fill."""

    tokens: Tensor  # (B, L), the mask's id where there is something to write
    mask_id: int
    samples: Tensor  # (B,) index of each sample within the seed
    stream: tuple[int, ...] = ()  # first numbers of all random streams
    masks: int = 1
    """Ids that mean a mask, from `mask_id` on. In a step all masks of a text carry one of them, its
    code, drawn anew for each step: what is drawn independently shares something random."""

    @property
    def open(self) -> Tensor:
        """(B, L) positions to write."""
        return self.tokens == self.mask_id

    @classmethod
    def blank(
        cls,
        num: int,
        length: int,
        mask_id: int,
        *,
        first: int = 0,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Canvas of masks alone, for the samples first .. first + num of a seed."""
        tokens = torch.full((num, length), mask_id, device=device)
        return cls(tokens, mask_id, torch.arange(first, first + num, device=device))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The batch after one step, as a callback sees it."""

    index: int  # number of the step, from 0
    steps: int  # steps scheduled in all
    time: float  # where the step started, 1 to 0
    tokens: Tensor  # (B, L) after the step, masks where nothing is written yet
    revealed: Tensor  # (B, L) positions written by this step
    confidence: Tensor  # (B, L) probability of the token written last, 0 where there is none
    open: Tensor  # (B, L) positions that were to write


Callback = Callable[[Snapshot], None]


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences, and how they came about."""

    tokens: Tensor  # (B, L)
    log_prob: Tensor | None
    """(B,) log-probability of the drawn tokens along the path, whose negative mean is the path
    entropy; None where a sampler's path has no such meaning."""
    nfe: int  # scheduled steps of the denoiser per sample
    passes: float  # forward passes that really ran, per sample; a backward pass counts as two
    disc_calls: int = 0  # discriminator evaluations per sample
    written: Tensor | None = None  # (B, L) positions written rather than given
    lengths: tuple[int, ...] = ()
    """Of each text, where lengths were asked for; its window may be longer."""

    def cut(self) -> "Samples":
        """Without what fills a window behind a text whose length was asked for."""
        if not self.lengths:
            return self
        longest = max(self.lengths)
        tokens, written = self.tokens[:, :longest], self.written
        lengths = torch.tensor(self.lengths, device=tokens.device)[:, None]
        behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths
        return replace(
            self,
            tokens=tokens.masked_fill(behind, PAD),
            written=None if written is None else written[:, :longest],
        )


def join(parts: Sequence[Samples]) -> Samples:
    """Samples of several batches as one; shorter windows are padded behind."""
    if len(parts) == 1:
        return parts[0]
    total, width = sum(len(p.tokens) for p in parts), max(p.tokens.shape[1] for p in parts)
    paths = [p.log_prob for p in parts if p.log_prob is not None]
    written = [_widen(p.written, width, False) for p in parts if p.written is not None]
    return Samples(
        torch.cat([_widen(p.tokens, width, PAD) for p in parts]),
        torch.cat(paths) if len(paths) == len(parts) else None,
        nfe=max(p.nfe for p in parts),
        passes=sum(p.passes * len(p.tokens) for p in parts) / total,
        disc_calls=max(p.disc_calls for p in parts),
        written=torch.cat(written) if len(written) == len(parts) else None,
        lengths=tuple(length for p in parts for length in p.lengths),
    )


def _widen(table: Tensor, width: int, value: int | bool) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)


@dataclass(frozen=True, slots=True)
class Reads:
    """Texts as networks read them."""

    tokens: Tensor  # (U, L), any token where there is padding
    attended: Tensor | None = None  # (U, L) positions that are not padding; None: all

    def __len__(self) -> int:
        return len(self.tokens)

    def masked_share(self, mask_id: int) -> Tensor:
        """(U,) part of each text that is masked, padding not counted."""
        attended = self.tokens.shape[1] if self.attended is None else self.attended.sum(1)
        masked = (self.tokens == mask_id).sum(1)
        return masked / torch.as_tensor(attended, device=masked.device).clamp(min=1)


def split_padding(z: Tensor) -> Reads:
    """Texts (U, L) with padding as networks read them; waits for a GPU."""
    return without_padding(z) if bool((z == PAD).any()) else Reads(z)


def without_padding(z: Tensor) -> Reads:
    """Texts (U, L) of which some have padding."""
    padded = z == PAD
    return Reads(z.masked_fill(padded, 0), ~padded)


class State:
    """Texts z (B, L), how they are drawn, and what the tokens written so far cost.

    A sampler takes one, and uses it up.
    """

    def __init__(
        self,
        canvas: Canvas,
        settings: DrawOptions = PLAIN,
        callback: Callback | None = None,
        *,
        keeps: bool = False,
        padded: bool | None = None,
    ) -> None:
        """`keeps`: z is not changed in place; `padded`: there is padding, None: not known yet."""
        self.canvas, self.mask_id, self.open = canvas, canvas.mask_id, canvas.open
        self.settings, self.callback, self.padded = settings, callback, padded
        self.steps = 0  # scheduled in all, as soon as a sampler knows
        self.noise = Noise(settings.seed, canvas.samples, canvas.stream)
        self.z = canvas.tokens.clone(memory_format=torch.contiguous_format)
        # Log-probabilities: of the token written last at each position, and beside them (B,).
        self.costs = torch.zeros(self.z.shape, dtype=torch.float64, device=self.z.device)
        self.correction: Tensor | float = 0.0
        self.passes = 0.0
        self.calls: Tensor | None = None  # (B,) evaluations of a discriminator
        self._keeps = keeps or callback is not None
        self.shown, self._reports = self.z, 0  # z as a callback saw it last, and how many did

    @property
    def measured(self) -> bool:
        """True if the path of plain draws has a known probability."""
        return self.canvas.masks == 1 or self.settings.measure_path

    @property
    def masked(self) -> Tensor:
        """(B, L) positions still to write."""
        return self.z == self.mask_id

    def reads(self, rows: Tensor | None = None, code: Tensor | int | None = None) -> Reads:
        """Texts for a pass: all, or some rows (U,); their masks carry a code (U,), if there is one.

        The first call waits for a GPU.
        """
        z = self.z if rows is None else self.z[rows]
        return self.as_reads(z if code is None else with_code(z, self.mask_id, code))

    def as_reads(self, z: Tensor) -> Reads:
        """Any texts (U, L) of this batch for a pass."""
        if self.padded is None:
            self.padded = bool((self.canvas.tokens == PAD).any())
        return split_padding(z) if self.padded else Reads(z)

    def same_as(self, row: Tensor) -> Tensor:
        """(B,) texts that equal that of `row` (1,)."""
        return (self.z == self.z[row]).all(1)

    def count(self, rows: int, passes: int = 1) -> None:
        """Count passes over so many texts."""
        self.passes += passes * rows / len(self.z)

    def count_calls(self, texts: Tensor, calls: int) -> None:
        """Count evaluations of a discriminator for some texts (N,), each once."""
        calls_of = torch.zeros(len(self.z), dtype=torch.long, device=self.z.device)
        calls_of.index_fill_(0, texts, calls)
        self.calls = calls_of if self.calls is None else self.calls + calls_of

    def write(self, at: Tensor, tokens: Tensor, log_p: Tensor) -> None:
        """Write tokens (N,) with their log-probabilities (N,) at flat positions (N,)."""
        if self._keeps:
            self.z, self.costs = self.z.clone(), self.costs.clone()
        self.z.view(-1).scatter_(0, at, tokens)
        self.costs.view(-1).scatter_(0, at, log_p.double())

    def erase(self, at: Tensor) -> None:
        """Mask flat positions (N,) that were written."""
        self.write(at, torch.full_like(at, self.mask_id), torch.zeros_like(at))

    def report(self, time: float) -> None:
        """Show a callback, if there is one, the batch after a step that started at a time."""
        if self.callback is None:
            return
        z, index, revealed = self.z, self._reports, (self.z != self.shown) & ~self.masked
        self.shown, self._reports = z, index + 1
        confidence = self.costs.exp().masked_fill(~self.open | self.masked, 0.0)
        self.callback(Snapshot(index, self.steps, time, z, revealed, confidence, self.open))

    def samples(self, nfe: int | None = None, *, exact_path: bool | None = None) -> Samples:
        """Return the result, by `nfe` steps if not those that were scheduled.

        Weights that give no numbers are refused here, once.
        """
        log_prob = self.costs.sum(1) + self.correction
        if bool(log_prob.isnan().any()):
            raise UserError("The model's logits are not numbers: its weights are damaged.")
        exact = self.measured if exact_path is None else exact_path
        calls = 0 if self.calls is None else max(self.calls.tolist())
        nfe = self.steps if nfe is None else nfe
        path = log_prob if exact else None
        return Samples(self.z, path, nfe, self.passes, calls, self.open)
