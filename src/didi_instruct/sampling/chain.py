"""What all samplers of masked diffusion share: the text on its way from masks to words.

A sampler is a free function that moves a `Chain` from a `Canvas` to `Samples`. The chain owns the
bookkeeping: which positions are still open, what the drawn tokens cost, how many passes ran, who is
watching.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.graphs import LOGITS_AT_ONCE
from didi_instruct.process.masking import with_code
from didi_instruct.sampling.categorical import draw, restrict
from didi_instruct.sampling.noise import uniforms

PAD = -1
"""In z: nothing is here, neither text nor mask. Never attended, never written."""
PART_ELEMENTS = 2**24
"""Entries held at a time of float64 laws over the vocabulary, where every mask needs one."""
NOISE_ELEMENTS = 2**21
"""Random numbers of coming steps that are made at once: a step alone is all small launches."""


class Denoiser(Protocol):
    """(z (B, L), t (B,)) -> logits (B, L, V) over the real tokens.

    A denoiser may also have `rows(z, t, where) -> logits (R, V)`, those of the positions that the
    mask `where` (B, L) selects, in order, for less than the price of all; and
    `draw(logits (R, V), uniforms (R,)) -> tokens, log-probabilities`, a way of its own to draw
    from the law of its logits as it is.
    """

    def __call__(self, z: Tensor, t: Tensor, /) -> Tensor:
        """Logits of the clean token at every position."""


class Purpose(IntEnum):
    """What random numbers are for: the first number of their stream."""

    REVEAL = 0
    TOKEN = 1
    SELECT = 2
    REMASK = 3
    ORDER = 4
    START = 5
    BLOCK = 6
    CODE = 7
    LENGTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How tokens are drawn."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    measure_path: bool = True
    """Sum a step's code out of its log-probability, where a model has codes: a pass for each of
    them, which is not counted. Without it the log-probability of such a model is not known."""

    @property
    def as_it_is(self) -> bool:
        """Whether tokens are drawn from the denoiser's own law."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k is None


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where sampling starts: given tokens, and masks to fill."""

    tokens: Tensor
    """(B, L), the mask's id where there is something to write."""
    mask_id: int
    samples: Tensor
    """(B,) index of each sample within the seed."""
    allowed: Tensor | None = None
    """(L,) or (B, L) positions where masks may be filled; the others stay masks. None: all."""
    stream: tuple[int, ...] = ()
    """First numbers of all its random streams: a text written in parts has other noise in each."""
    masks: int = 1
    """Ids that mean a mask, from `mask_id` on: all masks of a text carry one of them in a step,
    drawn anew for each, so that positions drawn independently share something random: a code."""

    @property
    def open(self) -> Tensor:
        """(B, L) positions to write."""
        masked = self.tokens == self.mask_id
        return masked if self.allowed is None else masked & self.allowed

    @classmethod
    def blank(
        cls,
        num: int,
        length: int,
        mask_id: int,
        *,
        first: int = 0,
        device: str | torch.device = "cpu",
    ) -> "Canvas":
        """Nothing given: samples first .. first + num of a seed."""
        tokens = torch.full((num, length), mask_id, device=device)
        return cls(tokens, mask_id, torch.arange(first, first + num, device=device))


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as a callback sees it."""

    index: int
    """From 0."""
    steps: int
    """Scheduled in all."""
    time: float
    """Where the step started, 1 to 0."""
    tokens: Tensor
    """(B, L) after the step, masks where nothing is written yet."""
    revealed: Tensor
    """(B, L) positions written by this step."""
    confidence: Tensor
    """(B, L) probability that the denoiser gave to the token written last, 0 elsewhere."""
    open: Tensor | None = None
    """(B, L) positions that were to write; None: all."""


Callback = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences, and how they came about."""

    tokens: Tensor
    """(B, L)."""
    log_prob: Tensor | None
    """(B,) log-probability of the drawn tokens along the path, whose negative mean is the path
    entropy; None where a sampler's path has no such meaning."""
    nfe: int
    """Scheduled steps of the denoiser per sample."""
    passes: float
    """Forward-pass equivalents that really ran, per sample; a backward pass counts as two."""
    disc_calls: int = 0
    """Discriminator evaluations per sample."""


class Chain:
    """The state of a batch of samples."""

    def __init__(
        self,
        denoiser: Denoiser,
        canvas: Canvas,
        settings: Draw,
        *,
        steps: int,
        callback: Callback | None = None,
    ) -> None:
        if steps < 1:
            raise UserError(f"steps is {steps}: use 1 or more.")
        self.denoiser, self.canvas, self.settings = denoiser, canvas, settings
        self.steps, self.callback = steps, callback
        self.z = canvas.tokens.clone(memory_format=torch.contiguous_format)
        self.open = canvas.open
        """Positions to write, whether they are written yet or not."""
        batch = len(self.z)
        self.log_prob = torch.zeros(batch, dtype=torch.float64, device=self.z.device)
        self.confidence = torch.zeros(self.z.shape, dtype=torch.float64, device=self.z.device)
        self.passes = 0.0
        self._index = 0
        self._times = torch.zeros(batch, device=self.z.device)
        self._ahead: dict[int, tuple[int, Tensor]] = {}
        """By purpose: the first step that numbers were made for, and they (N, B, L)."""

    @property
    def masked(self) -> Tensor:
        """(B, L) positions still to write."""
        return (self.z == self.canvas.mask_id) & self.open

    @property
    def share(self) -> float:
        """Part of the open positions that is still masked: the clock of samplers without another.

        It falls from 1 to 0 as time does.
        """
        return float(self.masked.sum() / self.open.sum().clamp(min=1))

    def uniforms(self, *stream: int) -> Tensor:
        """(B, L) numbers in [0, 1) for a purpose, a step, …."""
        if len(stream) == 2 and self.z.is_cuda:
            return self._one_of_many(*stream)
        stream = (*self.canvas.stream, *stream)
        return uniforms(self.settings.seed, self.canvas.samples, stream, self.z.shape[1])

    def _one_of_many(self, purpose: int, step: int) -> Tensor:
        """The same numbers, made for this step and the next ones together."""
        return self.ahead(purpose, step)[0]

    def ahead(self, purpose: int, step: int, *also: int) -> Tensor:
        """(N, B, L) numbers of a step and of those after it, as far as they are made at once.

        Those for the purposes `also` are made in passing.
        """
        first, numbers = self._ahead.get(purpose, (step, None))
        if numbers is None or not first <= step < first + len(numbers):
            purposes = torch.tensor([purpose, *also])  # on the CPU: no GPU has to wait for them
            room = NOISE_ELEMENTS // max(1, self.z.numel() * len(purposes))
            steps = torch.arange(step, step + max(1, min(self.steps - step, room)))
            where = [n.to(self.z.device, non_blocking=True) for n in (purposes, steps)]
            stream: tuple[int | Tensor, ...] = self.canvas.stream
            stream = (*stream, where[0][:, None, None], where[1][:, None])
            samples, length = self.canvas.samples, self.z.shape[1]
            made = uniforms(self.settings.seed, samples, stream, length)
            for key, own in zip((purpose, *also), made, strict=True):
                self._ahead[key] = step, own
            first, numbers = self._ahead[purpose]
        return numbers[step - first :]

    @property
    def code(self) -> Tensor:
        """(B,) which of the masks each sample has in this step."""
        if self.canvas.masks == 1:
            return torch.zeros_like(self.canvas.samples)
        stream = (*self.canvas.stream, Purpose.CODE, self._index)
        numbers = uniforms(self.settings.seed, self.canvas.samples, stream, 1).squeeze(1)
        return (numbers * self.canvas.masks).long()

    def logits(self, t: float | Tensor, where: Tensor) -> Tensor:
        """Logits (R, V) of the positions `where` (B, L) selects; rows without one are not run.

        t is one time for all samples, or (B,).
        """
        if not where.any():
            raise ValueError("no position is selected: the step needs no pass")
        self._times = torch.as_tensor(t, device=self.z.device).expand(len(self.z))
        logits, rows = self._run(self.code, where)
        self.passes += rows / len(self.z)
        return logits

    def _run(self, code: Tensor, where: Tensor) -> tuple[Tensor, int]:
        """Logits (R, V) of the selected positions under codes (B,), and the rows that ran."""
        active = where.any(1)
        z, times = self.z, self._times
        if not active.all():  # choosing all would wait for the GPU four times
            z, times, code, where = z[active], times[active], code[active], where[active]
        if len(z) > 1 and bool((z == z[:1]).all() & (times == times[:1]).all()):
            # The same text in every row, such as all masks: one row for each code serves all.
            codes, which = torch.unique(code, return_inverse=True)
            columns = where.any(0)
            rows = with_code(z[:1].expand(len(codes), -1), self.canvas.mask_id, codes)
            everywhere = columns.expand(len(codes), -1)
            shared = logits_where(self.denoiser, rows, times[: len(codes)], everywhere)
            row, column = where.nonzero().unbind(1)
            place = which[row] * columns.sum() + columns.cumsum(0)[column] - 1
            return shared[place], len(codes)
        coded = z if self.canvas.masks == 1 else with_code(z, self.canvas.mask_id, code)
        return logits_where(self.denoiser, coded, times, where), len(z)

    def law(self, logits: Tensor) -> Tensor:
        """Log-probabilities (R, V) that tokens are drawn from."""
        s = self.settings
        return restrict(logits, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k)

    def write(self, where: Tensor, logits: Tensor, *stream: int, greedy: bool = False) -> None:
        """Draw a token for each selected position, in order, from the law of logits (R, V)."""
        token, log_p = self.draw(logits, self.uniforms(*stream)[where], greedy=greedy)
        if self.canvas.masks > 1 and self.settings.measure_path:
            self._sum_out_code(where, token, log_p, greedy=greedy)
        self.put(where, token, log_p)

    def draw(
        self, logits: Tensor, numbers: Tensor, *, greedy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens (R,) and their log-probabilities (R,) from logits (R, V) and numbers (R,)."""
        tokens, log_ps = [], []
        own = None if greedy or not self.settings.as_it_is else getattr(self.denoiser, "draw", None)
        # A draw of the denoiser's own holds no float64 laws: many rows at a time, few launches.
        most = PART_ELEMENTS if own is None else LOGITS_AT_ONCE
        for part, part_numbers in in_parts(logits, numbers, most=most):
            if own is not None:
                token, log_p = own(part, part_numbers)
            else:
                law = restrict(part, temperature=0.0) if greedy else self.law(part)
                token = draw(law, part_numbers)
                log_p = law.gather(-1, token[:, None]).squeeze(-1)
            tokens.append(token)
            log_ps.append(log_p)
        return torch.cat(tokens), torch.cat(log_ps)

    def _sum_out_code(self, where: Tensor, token: Tensor, log_p: Tensor, *, greedy: bool) -> None:
        """Correct the path's log-probability from the drawn code's to that of the mixture."""
        row = where.nonzero()[:, 0]
        drawn, own_code = torch.zeros_like(self.log_prob).index_add_(0, row, log_p), self.code
        each = []
        for code in range(self.canvas.masks):
            logits, _ = self._run(torch.full_like(self.canvas.samples, code), where)
            found = torch.zeros_like(self.log_prob)
            start = 0
            for (part,) in in_parts(logits):
                law = restrict(part, temperature=0.0) if greedy else self.law(part)
                end = start + len(part)
                own = law.gather(-1, token[start:end, None]).squeeze(-1)
                found.index_add_(0, row[start:end], own)
                start = end
            # The drawn code as it was drawn: a batch of another shape may round otherwise.
            each.append(torch.where(own_code == code, drawn, found))
        mixture = torch.stack(each).logsumexp(0) - math.log(self.canvas.masks)
        self.log_prob += mixture - drawn

    def put(self, where: Tensor, token: Tensor, log_p: Tensor) -> None:
        """Write tokens (R,) that had these log-probabilities (R,)."""
        self.z = self.z.masked_scatter(where, token)
        self.log_prob.index_add_(0, where.nonzero()[:, 0], log_p)
        self.confidence = self.confidence.masked_scatter(where, log_p.exp())

    def put_at(self, place: Tensor, token: Tensor, log_p: Tensor) -> None:
        """`put` at positions by their numbers (R,) in (B * L), which needs no wait for a GPU.

        What the tokens cost is left to the caller.
        """
        if self.callback is None:  # nobody keeps what was there before
            self.z.view(-1).scatter_(0, place, token)
        else:
            self.z = self.z.flatten().scatter(0, place, token).view_as(self.z)
            confidence = self.confidence.flatten().scatter(0, place, log_p.exp())
            self.confidence = confidence.view_as(self.z)

    def erase(self, where: Tensor) -> None:
        """Mask positions that were written."""
        self.z = self.z.masked_fill(where, self.canvas.mask_id)
        self.confidence = self.confidence.masked_fill(where, 0.0)

    def tell(self, time: float, revealed: Tensor) -> None:
        """End a step."""
        if self.callback is not None:
            step = Step(self._index, self.steps, time, self.z, revealed, self.confidence, self.open)
            self.callback(step)
        self._index += 1

    def samples(self, nfe: int, *, exact_path: bool = True, disc_calls: int = 0) -> Samples:
        """Return the result; weights that give no numbers are refused here, once."""
        if bool(self.log_prob.isnan().any()):
            raise UserError("The model's logits are not numbers: its weights are damaged.")
        known = self.canvas.masks == 1 or self.settings.measure_path
        log_prob = self.log_prob if exact_path and known else None
        return Samples(self.z, log_prob, nfe, self.passes, disc_calls)


def logits_where(denoiser: Denoiser, z: Tensor, t: float | Tensor, where: Tensor) -> Tensor:
    """Logits (R, V) of the selected positions, from a denoiser that may know a shortcut.

    t is one time, or one for each row of z (B, L).
    """
    times = torch.as_tensor(t, dtype=torch.float32, device=z.device).expand(len(z))
    rows = getattr(denoiser, "rows", None)
    logits: Tensor = denoiser(z, times)[where] if rows is None else rows(z, times, where)
    return logits


def masked_share(z: Tensor, mask_id: int) -> Tensor:
    """Part of each text that is masked, padding not counted: (B, L) -> (B,)."""
    return (z == mask_id).sum(1) / (z != PAD).sum(1).clamp(min=1)


def in_parts(
    logits: Tensor, *companions: Tensor, most: int | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Rows of logits (R, V) and of what belongs to them (R, ...), as many at a time as fit.

    `most` are the entries of logits in a part, `PART_ELEMENTS` unless told.
    """
    rows = max(1, (PART_ELEMENTS if most is None else most) // logits.shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in (logits, *companions)), strict=True)


def join(parts: Sequence[Samples]) -> Samples:
    """Samples of several batches as one."""
    if len(parts) == 1:
        return parts[0]
    total = sum(len(p.tokens) for p in parts)
    paths = [p.log_prob for p in parts if p.log_prob is not None]
    return Samples(
        torch.cat([p.tokens for p in parts]),
        torch.cat(paths) if len(paths) == len(parts) else None,
        nfe=max(p.nfe for p in parts),
        passes=sum(p.passes * len(p.tokens) for p in parts) / total,
        disc_calls=max(p.disc_calls for p in parts),
    )
