"""Texts with gaps to fill: their templates, and the lengths of the gaps."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw, with_code
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import Purpose, uniforms
from didi_instruct.sampling.state import PAD, split_padding

GAP = re.compile(r" *_{3,}")
WITNESSES = 4  # given tokens after a gap that testify to its length


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions to write: between `shortest` and `longest` of them."""

    shortest: int
    longest: int
    chosen: bool = False  # the model chooses the number; else it is drawn evenly

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"A gap of {self.shortest} to {self.longest} tokens cannot be: give 1 or more, the "
                "smaller number first."
            )


@dataclass(frozen=True, slots=True)
class Ending:
    """How texts end that have windows of their own."""

    law: LengthLaw
    end_id: int
    length: int  # of a window

    def fill(self, row: list[int]) -> list[int]:
        """Return a window: the row, and ends behind it."""
        return row + [self.end_id] * (self.length - len(row))


@dataclass(frozen=True, slots=True)
class Template:
    """Given tokens, and the gaps between them."""

    pieces: list[list[int]]  # one more than gaps: the first and the last may be empty
    gaps: list[Gap]
    ending: Ending | None = None  # of texts that have windows of their own

    @property
    def given(self) -> int:
        """Number of given tokens."""
        return sum(map(len, self.pieces))

    def fit(self, length: int) -> "Template":
        """Shorten what the model may choose so that any choice fits into `length` positions."""
        room = length - self.given - sum(gap.shortest for gap in self.gaps)
        if room < 0:
            raise UserError(
                f"The text has {length - room} tokens or more, the model reads {length}."
            )
        drawn = sum(gap.longest - gap.shortest for gap in self.gaps if not gap.chosen)
        if drawn > room:
            raise UserError(
                f"The text may have {length - room + drawn} tokens, the model reads {length}: "
                "use shorter gaps."
            )
        each = (room - drawn) // max(1, sum(gap.chosen for gap in self.gaps))
        gaps = [
            replace(gap, longest=min(gap.longest, gap.shortest + each)) if gap.chosen else gap
            for gap in self.gaps
        ]
        return replace(self, gaps=gaps)

    def lay_out(self, lengths: Sequence[int], mask_id: int) -> list[int]:
        """Return the row whose gaps have these lengths."""
        row: list[int] = []
        for piece, length in zip(self.pieces, [*lengths, 0], strict=True):
            row += [*piece, *[mask_id] * length]
        return row if self.ending is None else self.ending.fill(row)


def parse_gaps(text: str, count: int) -> list[Gap]:
    """Read the gaps of a text: one for all of its gaps, or as many with commas between them.

    A gap is `8`, `4-12`, `auto` (the model chooses 1 to 16) or `auto:2-30`.
    """
    gaps = [_parse_gap(part.strip(), text) for part in text.split(",")]
    if len(gaps) not in (1, count):
        raise UserError(f"--gap {text} has {len(gaps)} gaps, the text {count}: give one, or each.")
    return gaps if len(gaps) == count else gaps * count


def _parse_gap(part: str, text: str) -> Gap:
    if part == "auto":
        return Gap(1, 16, chosen=True)
    match = re.fullmatch(r"(auto:)?(\d+)(?:-(\d+))?", part)
    if match is None:
        raise UserError(f"--gap {text}: write 8, 4-12, auto or auto:4-12.")
    return Gap(int(match[2]), int(match[3] or match[2]), chosen=match[1] is not None)


def split_infill(text: str) -> list[str]:
    """Cut a text at its gaps, which are three or more underscores.

    Spaces before a gap are dropped: what is written there brings its own.
    """
    pieces = GAP.split(text)
    if len(pieces) < 2:
        raise UserError(f"--infill {text!r} has no gap: mark it with ___.")
    if not all(pieces[1:-1]):
        raise UserError(f"--infill {text!r} has two gaps in a row: make them one.")
    return pieces


def stack(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Rows of any lengths as one batch, padded at the end: (B, longest)."""
    width = max(len(row) for row in rows)
    padded = array("q")  # which takes numbers faster than tensors do
    for row in rows:
        padded.extend([*row, *[PAD] * (width - len(row))])
    flat = torch.frombuffer(padded, dtype=torch.long) if padded else torch.empty(0).long()
    return flat.view(len(rows), width).to(device, non_blocking=True)


def gap_lengths(
    template: Template,
    denoiser: Denoiser,
    mask_id: int,
    seed: int,
    samples: Tensor,
    eot_id: int | None = None,
    masks: int = 1,
) -> tuple[list[list[int]], int]:
    """Lengths of a template's gaps, for each sample, and the forward passes that took.

    A gap drawn evenly takes one uniform per sample. A chosen one is drawn from
    p(length) proportional to the probability of the first given tokens after it, all masked in one
    pass per candidate: text that comes too early or too late is improbable where it stands. After
    a last gap that token is the end of text; without one the length is drawn evenly. Where a model
    has several masks, the probability is that of their mixture. Where texts have windows of their
    own, no end of text is written, and how long texts are has a say in every chosen length.
    """
    if template.ending is None and eot_id is not None and not template.pieces[-1]:
        template = replace(template, pieces=[*template.pieces[:-1], [eot_id]])
    drawn = uniforms(seed, samples, (Purpose.START,), len(template.gaps)).cpu()
    lengths, passes = [], 0
    for k, gap in enumerate(template.gaps):
        candidates = gap.longest - gap.shortest + 1
        scores = torch.zeros(candidates, dtype=torch.float64)
        if gap.chosen and candidates > 1:
            scores, used = _length_scores(template, k, denoiser, mask_id, samples.device, masks)
            passes += used
        law = scores.softmax(0).cumsum(0)
        index = torch.searchsorted(law, drawn[:, k].contiguous(), right=True)
        lengths.append(gap.shortest + index.clamp(max=candidates - 1))
    return torch.stack(lengths, 1).tolist(), passes


def _length_scores(
    template: Template,
    which: int,
    denoiser: Denoiser,
    mask_id: int,
    device: torch.device,
    masks: int,
) -> tuple[Tensor, int]:
    """Log-weights (C,) of the lengths of one gap, the others at their middle, and the passes."""
    gap, witnesses = template.gaps[which], template.pieces[which + 1][:WITNESSES]
    middle = [(g.shortest + g.longest) // 2 for g in template.gaps]
    lengths = torch.tensor(middle).repeat(gap.longest - gap.shortest + 1, 1)
    lengths[:, which] = torch.arange(gap.shortest, gap.longest + 1)
    scores = torch.zeros(len(lengths), dtype=torch.float64)
    if template.ending is not None:
        scores = template.ending.law.log_prob(template.given + lengths.sum(1))
    if not witnesses:
        return scores, 0
    texts = stack([template.lay_out(row, mask_id) for row in lengths.tolist()])
    start = sum(map(len, template.pieces[: which + 1])) + lengths[:, : which + 1].sum(1)
    start += texts.shape[1] * torch.arange(len(texts))
    at = (start[:, None] + torch.arange(len(witnesses))).flatten()
    texts.view(-1)[at] = mask_id
    z, at = texts.to(device), at.to(device)
    time, truth = split_padding(z).masked_share(mask_id), witnesses * len(texts)
    each = []
    for code in range(masks):
        coded = split_padding(with_code(z, mask_id, code))
        logits = denoiser.logits(coded, time, at)
        log_p = logits.double().log_softmax(-1).cpu()
        each.append(log_p[range(len(truth)), truth].view(len(texts), -1).sum(1))
    return scores + torch.stack(each).logsumexp(0), masks * len(texts)
