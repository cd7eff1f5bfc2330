"""Requests for samples: prompts, gaps, lengths and given tokens, drawn batch by batch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig, read_lengths
from didi_instruct.config.schema import nearest
from didi_instruct.data.tokenizer import Tokenizer, check_residues, is_protein
from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw
from didi_instruct.sampling.draw import DrawOptions, Purpose, uniforms
from didi_instruct.sampling.infill import (
    Ending,
    Template,
    gap_lengths,
    parse_gaps,
    split_infill,
    stack,
)
from didi_instruct.sampling.registry import SampledModel, find_sampler
from didi_instruct.sampling.state import PAD, Callback, Canvas, Samples, State, join
from didi_instruct.sampling.trace import output_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for samples: number, lengths, given text, sampler and seed."""

    num: int = 1
    """Number of samples; with several prompts or lengths, of each."""
    steps: int | None = None
    """Steps of the sampler, 16 by default; some samplers take one for each token."""
    length: int | None = None
    """Tokens of the window, given ones included; by default the longest that the model reads. Where
    texts have windows of their own: tokens of the text, by default drawn."""
    lengths: str | Sequence[int] | None = None
    """Several lengths in one batch, `100,200,300`, or a range, `100-500`, from which the length of
    each sample is drawn evenly. For masked models; shorter rows are padded with -1 behind."""
    sampler: str | None = None
    """Name of the sampler; by default the plain one of the model's kind."""
    prompt: str | Sequence[str] | None = None
    """Text to continue, or several texts."""
    suffix: str | None = None
    """Text that ends the window."""
    infill: str | None = None
    """Text with gaps, `Once ___ time`; the window is then as long as the text."""
    gap: str | None = None
    """Tokens of a gap: `8`, or `4-12`; `auto` (the default) or `auto:4-12` lets the model choose;
    `20,30-40` sets the first gap and the second."""
    tokens: Tensor | None = None
    """Ids (L,) or (B, L), with the mask's id wherever to write."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the sampler by name."""
    measure_path: bool = False
    """Compute the path's log-probability even where that costs passes: with several masks."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        for name in ("num", "steps", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name} is {value}: use a whole number, 1 or more.")
        if self.gap is not None and self.infill is None:
            raise UserError("gap says how long the gaps of infill are: give infill too.")
        for name in ("length", "lengths"):
            follows = self.infill is not None or self.tokens is not None
            if follows and getattr(self, name) is not None:
                raise UserError(f"The length follows from what is given: leave out {name}.")
        if self.length is not None and self.lengths is not None:
            raise UserError("length and lengths say the same thing: leave out one of them.")
        self.spans()
        if self.infill is not None and (self.prompt is not None or self.suffix is not None):
            raise UserError("infill holds all that is given: leave out prompt and suffix.")
        if self.tokens is not None and (self.infill or self.prompt or self.suffix):
            raise UserError("tokens hold all that is given: leave out prompt, suffix and infill.")

    @classmethod
    def of(cls, num: int, settings: Mapping[str, Any]) -> "Request":
        """Request with settings by name; a typo is an error."""
        names = [f.name for f in fields(cls)]
        for name in settings:
            if name not in names:
                raise UserError(f"`{name}` is not a setting of sampling.{nearest(name, names)}")
        return cls(num=num, **settings)

    def spans(self) -> list[range]:
        """Ranges of lengths, each for `num` samples of a prompt; empty if no length is set."""
        if self.length is not None:
            return [range(self.length, self.length + 1)]
        if self.lengths is None:
            return []
        text = self.lengths if isinstance(self.lengths, str) else ",".join(map(str, self.lengths))
        found = read_lengths(text)
        return [found] if isinstance(found, range) else [range(n, n + 1) for n in found]

    def prompts(self) -> list[str]:
        """Texts to continue; an empty one where nothing is given."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt or [""])

    @property
    def total(self) -> int:
        """Samples in all, unless tokens are given."""
        return self.num * len(self.prompts()) * max(1, len(self.spans()))


STRIDE = 1 << 32
"""Sample i of the k-th prompt or length has index i + k * STRIDE, however many there are."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Start of a sample."""

    sample: int
    """Its index within the seed."""
    tokens: list[int]
    """Given tokens and masks."""
    log_prob: float = 0.0
    """Of the length, where the model drew it."""
    length: int = 0
    """Of the text."""


def generate(request: Request, model: SampledModel, callback: Callback | None = None) -> Samples:
    """Draw what is asked for, batch by batch; the callback sees every step."""
    sampler, config = find_sampler(request.sampler, model.config.kind), model.config
    settings = DrawOptions(
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        measure_path=request.measure_path,
    )
    rows, extra = _rows(request, model)
    spans, parts = request.spans(), []
    for first in range(0, len(rows), request.batch_size):
        chunk = rows[first : first + request.batch_size]
        samples = torch.tensor([row.sample for row in chunk]).to(model.device, non_blocking=True)
        given = stack([row.tokens for row in chunk], model.device)
        canvas = Canvas(given, config.mask_symbol, samples, masks=config.masks)
        part = sampler(model, State(canvas, settings, callback), request.steps, request.options)
        log_prob, drawn_first = part.log_prob, [row.log_prob for row in chunk]
        if log_prob is not None and any(drawn_first):
            log_prob = log_prob + log_prob.new_tensor(drawn_first)
        lengths = tuple(row.length for row in chunk) if spans else ()
        passes = part.passes + extra / len(rows)
        parts.append(replace(part, passes=passes, log_prob=log_prob, lengths=lengths))
    return join(parts)


def _rows(request: Request, model: SampledModel) -> tuple[list[_Row], int]:
    """One row for each sample, and the forward passes that choosing them took."""
    if request.tokens is not None:
        return list(_given(request.tokens, request.num, model.config)), 0
    if request.infill is not None:
        return _filled(request, model)
    return list(_framed(request, model)), 0


def _framed(request: Request, model: SampledModel) -> Iterator[_Row]:
    """Masks after a prompt and before a suffix; then the end, if texts have their own windows."""
    config, tokenizer = model.config, model.tokenizer
    if request.lengths is not None and config.kind != "mdlm":
        raise UserError(f"lengths are for masked models: give one of kind {config.kind} a length.")
    spans, ending = request.spans(), _ending(config)
    longest = max((span[-1] for span in spans), default=1)
    if longest > config.length:
        raise UserError(f"length is {longest}: this model writes 1 to {config.length} tokens.")
    law = ending.law if ending and not spans else None
    spans = spans or [range(config.length, config.length + 1)]
    after = _encode(request.suffix or "", tokenizer)
    for k, (text, span) in enumerate(itertools.product(request.prompts(), spans)):
        before = _encode(text, tokenizer)
        given = len(before) + len(after)
        if given >= span[0]:
            raise UserError(
                f"The prompt has {given} tokens, the window {span[0]}: "
                "nothing is left to write. Shorten it or raise length."
            )
        samples = torch.arange(request.num) + k * STRIDE
        numbers = uniforms(request.seed, samples, (Purpose.LENGTH,), 1).squeeze(1)
        lengths, log_prob = span[0] + (numbers * len(span)).long(), torch.zeros(request.num)
        if law is not None:
            lengths = law.draw(numbers, shortest=given + 1)
            log_prob = law.log_prob(lengths, shortest=given + 1)
        drawn = zip(samples.tolist(), lengths.tolist(), log_prob.tolist(), strict=True)
        for sample, count, log_p in drawn:
            row = [*before, *[config.mask_symbol] * (count - given), *after]
            yield _Row(sample, ending.fill(row) if ending else row, log_p, count)


def _ending(config: ModelConfig) -> Ending | None:
    """Ending of a masked model's texts, where they have windows of their own."""
    if config.end_id is None or config.kind != "mdlm":
        return None
    return Ending(LengthLaw(config.lengths), config.end_id, config.length)


def _filled(request: Request, model: SampledModel) -> tuple[list[_Row], int]:
    """Texts with gaps."""
    config, tokenizer, denoiser = model.config, model.tokenizer, model.denoiser
    if denoiser is None:
        raise UserError("An AR model writes from left to right and cannot fill gaps: use prompt.")
    pieces = [_encode(piece, tokenizer) for piece in split_infill(request.infill or "")]
    gaps = parse_gaps(request.gap or "auto", len(pieces) - 1)
    if config.kind == "duo" and any(gap.chosen for gap in gaps):
        raise UserError(
            "A uniform-state model cannot choose the length of a gap: give gap as 8 or 4-12."
        )
    template = Template(pieces, gaps, _ending(config)).fit(config.length)
    samples = torch.arange(request.num, device=model.device)
    eot_id = None if tokenizer is None else tokenizer.eot_id
    mask_id = config.mask_symbol
    chosen, passes = gap_lengths(
        template, denoiser, mask_id, request.seed, samples, eot_id, config.masks
    )
    return [_Row(i, template.lay_out(n, mask_id)) for i, n in enumerate(chosen)], passes


def _given(tokens: Tensor, num: int, config: ModelConfig) -> Iterator[_Row]:
    mask_id, table = config.mask_symbol, tokens if tokens.ndim == 2 else tokens[None]
    fits = table.ndim == 2 and table.numel() and table.shape[1] <= config.length
    if not fits or bool(((table != PAD) & ((table < 0) | (table > mask_id))).any()):
        raise UserError(
            f"tokens are (L,) or (B, L) ids of 0..{mask_id} with L up to {config.length}."
        )
    for k, row in enumerate(table.tolist()):
        for i in range(num):
            yield _Row(i + k * STRIDE, row)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if not text:
        return []
    if tokenizer is None:
        raise UserError("This model has no tokenizer: give token ids as `tokens`.")
    if is_protein(tokenizer.vocabulary):
        check_residues(text, tokenizer.vocabulary)
    try:
        return tokenizer.encode([text])[0]
    except UserError:
        unknown = ", ".join(f"`{word}`" for word in text.split() if word not in tokenizer)
        if not unknown:
            raise
        raise UserError(f"The model's vocabulary has no {unknown}: use words it knows.") from None


def to_text(tokens: Tensor, tokenizer: Tokenizer, written: Tensor | None = None) -> list[str]:
    """Decode samples; a text ends at its first written end-of-text, if nothing is given after."""
    marks = [None] * len(tokens) if written is None else written.tolist()
    return [
        tokenizer.decode(output_ids(row, tokenizer.eot_id, mark))
        for row, mark in zip(tokens.tolist(), marks, strict=True)
    ]
