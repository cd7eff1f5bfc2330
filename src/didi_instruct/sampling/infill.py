"""What is given and what is to be written: prefixes, suffixes, gaps."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import Purpose, uniforms
from didi_instruct.sampling.state import PAD, split_padding

GAP = re.compile(r" *_{3,}")
WITNESSES = 4
"""Given tokens after a gap that testify to its length."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions to write: between `shortest` and `longest` of them."""

    shortest: int
    longest: int
    chosen: bool = False
    """Whether the model chooses the number; else it is drawn evenly."""

    def __post_init__(self) -> None:
        """Refuse gaps that cannot be."""
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
    length: int
    """Of a window."""

    def fill(self, row: list[int]) -> list[int]:
        """A window: the row, and ends behind it."""
        return row + [self.end_id] * (self.length - len(row))


Template = list[list[int] | Gap]
"""Given tokens and gaps, in turn."""


def parse_gap(text: str) -> Gap:
    """Read `8`, `4-12`, `auto` (the model chooses 1 to 16) or `auto:2-30`."""
    if text == "auto":
        return Gap(1, 16, chosen=True)
    match = re.fullmatch(r"(auto:)?(\d+)(?:-(\d+))?", text)
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


def fit(template: Template, length: int) -> Template:
    """Shorten what the model may choose so that any choice fits into `length` positions."""
    gaps = [part for part in template if isinstance(part, Gap)]
    given = sum(len(part) for part in template if not isinstance(part, Gap))
    room = length - given - sum(gap.shortest for gap in gaps)
    if room < 0:
        raise UserError(f"The text has {length - room} tokens or more, the model reads {length}.")
    drawn = sum(gap.longest - gap.shortest for gap in gaps if not gap.chosen)
    if drawn > room:
        raise UserError(
            f"The text may have {length - room + drawn} tokens, the model reads {length}: "
            "use shorter gaps."
        )
    each = (room - drawn) // max(1, sum(gap.chosen for gap in gaps))
    return [
        replace(part, longest=min(part.longest, part.shortest + each))
        if isinstance(part, Gap) and part.chosen
        else part
        for part in template
    ]


def lay_out(template: Template, lengths: Sequence[int], mask_id: int) -> list[int]:
    """The row of a template whose gaps have these lengths."""
    row: list[int] = []
    gaps = iter(lengths)
    for part in template:
        row += [mask_id] * next(gaps) if isinstance(part, Gap) else part
    return row


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
    ending: Ending | None = None,
) -> tuple[list[list[int]], int]:
    """Lengths of a template's gaps, for each sample, and the forward passes that took.

    A gap drawn evenly takes one uniform per sample. A chosen one is drawn from
    p(length) proportional to the probability of the first given tokens after it, all masked in one
    pass per candidate: text that comes too early or too late is improbable where it stands. After
    a last gap that token is the end of text; without one the length is drawn evenly. Where a model
    has several masks, the probability is that of their mixture. Where texts have windows of their
    own, `ending` fills them, and how long texts are has a say in every chosen length.
    """
    if ending is not None:
        eot_id = None  # it is never written: the law of lengths stands for it
    if isinstance(template[-1], Gap) or not template[-1]:
        template = [*(part for part in template if part), [] if eot_id is None else [eot_id]]
    gaps = [part for part in template if isinstance(part, Gap)]
    drawn = uniforms(seed, samples, (Purpose.START,), len(gaps)).tolist()
    device = samples.device
    laws = [
        _length_law(template, k, denoiser, mask_id, masks, device, ending) for k in range(len(gaps))
    ]
    asks = (gap.chosen and _witnesses(template, k) for k, gap in enumerate(gaps))
    asked = [law for law, asks_it in zip(laws, asks, strict=True) if asks_it and len(law) > 1]
    passes = masks * sum(map(len, asked))
    result = []
    for numbers in drawn:
        row = []
        for gap, law, u in zip(gaps, laws, numbers, strict=True):
            index = int(torch.searchsorted(law, u, right=True).clamp(max=len(law) - 1))
            row.append(gap.shortest + index)
        result.append(row)
    return result, passes


def _length_law(
    template: Template,
    which: int,
    denoiser: Denoiser,
    mask_id: int,
    masks: int,
    device: torch.device,
    ending: Ending | None,
) -> Tensor:
    """Cumulative probabilities of the lengths of one gap, the others at their middle."""
    gaps = [part for part in template if isinstance(part, Gap)]
    gap = gaps[which]
    candidates = range(gap.shortest, gap.longest + 1)
    middle = [(g.shortest + g.longest) // 2 for g in gaps]
    witnesses = _witnesses(template, which)
    scores = torch.zeros(len(candidates), dtype=torch.float64)
    if gap.chosen and ending is not None:
        given = sum(len(part) for part in template if not isinstance(part, Gap))
        others = sum(middle) - middle[which]
        totals = torch.tensor([given + others + length for length in candidates])
        scores = ending.law.log_prob(totals)
    if gap.chosen and witnesses and len(candidates) > 1:
        rows, selected, truth = [], [], []
        for length in candidates:
            lengths = [*middle[:which], length, *middle[which + 1 :]]
            row = lay_out(template, lengths, mask_id)
            if ending is not None:
                row = ending.fill(row)
            start = _end_of_gap(template, which, lengths)
            hidden = range(start, start + witnesses)
            truth += [row[i] for i in hidden]
            rows.append([mask_id if i in hidden else token for i, token in enumerate(row)])
            selected.append([i in hidden for i in range(len(row))])
        reads = split_padding(stack(rows, device))
        at = (stack(selected, device) == 1).flatten().nonzero().squeeze(1)
        time = reads.masked_share(mask_id)
        each = []
        for code in range(masks):
            coded = reads.with_codes(mask_id, code)
            log_p = denoiser.logits(coded, time, at).double().log_softmax(-1).cpu()
            each.append(log_p[range(len(truth)), truth].view(len(candidates), witnesses).sum(1))
        scores = scores + torch.stack(each).logsumexp(0)
    return scores.softmax(0).cumsum(0)


def _witnesses(template: Template, which: int) -> int:
    """How many given tokens follow a gap, up to WITNESSES."""
    place = [i for i, part in enumerate(template) if isinstance(part, Gap)][which]
    following = template[place + 1] if place + 1 < len(template) else []
    return 0 if isinstance(following, Gap) else min(WITNESSES, len(following))


def _end_of_gap(template: Template, which: int, lengths: Sequence[int]) -> int:
    """Position after a gap."""
    position, seen = 0, -1
    for part in template:
        if isinstance(part, Gap):
            seen += 1
            position += lengths[seen]
            if seen == which:
                return position
        else:
            position += len(part)
    raise AssertionError("no such gap")
