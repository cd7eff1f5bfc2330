"""From a wish ("four stories, 16 steps, beginning so") to canvases, a sampler and samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.api.samplers import Call, Engine, find_sampler
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.process.masking import LengthLaw
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import DrawOptions, Purpose, uniforms
from didi_instruct.sampling.infill import (
    Ending,
    Template,
    gap_lengths,
    parse_gap,
    split_infill,
    stack,
)
from didi_instruct.sampling.state import PAD, Callback, Canvas, Samples, State, join
from didi_instruct.sampling.trace import output_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to generate, and how."""

    num: int = 1
    """Samples; with several prompts, samples of each."""
    steps: int | None = None
    """Steps of the sampler, 16 if not said; some samplers take as many as there are tokens."""
    length: int | None = None
    """Tokens of the window, what is given included; by default all the model can read. For a model
    whose texts have a window of their own: tokens of the text, by default drawn."""
    sampler: str | None = None
    """By default the plain one of the model's kind."""
    prompt: str | Sequence[str] | None = None
    """Text that comes first; several texts are continued in one batch."""
    suffix: str | None = None
    """Text that ends the window."""
    infill: str | None = None
    """Text with gaps, `Once ___ time`; the window is then as long as the text."""
    gap: str | None = None
    """Tokens of a gap: `8`, `4-12`; `auto` (the default) or `auto:4-12` for the model to choose."""
    tokens: Tensor | None = None
    """Given tokens anywhere, (L,) or (B, L), the mask's id where to write."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sampler by name."""
    measure_path: bool = False
    """Know the path's log-probability even where it costs passes: of models with several masks."""

    def __post_init__(self) -> None:
        """Refuse wishes that contradict themselves."""
        for name in ("num", "steps", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name} is {value}: use a whole number, 1 or more.")
        if self.gap is not None and self.infill is None:
            raise UserError("gap says how long the gaps of infill are: give infill too.")
        if self.length is not None and (self.infill is not None or self.tokens is not None):
            raise UserError("The length follows from what is given: leave out length.")
        if self.infill is not None and (self.prompt is not None or self.suffix is not None):
            raise UserError("infill holds all that is given: leave out prompt and suffix.")
        if self.tokens is not None and (self.infill or self.prompt or self.suffix):
            raise UserError("tokens hold all that is given: leave out prompt, suffix and infill.")


@dataclass(frozen=True, slots=True)
class Generated:
    """Samples, and which of their positions were written rather than given."""

    samples: Samples
    written: Tensor
    """(B, L)."""

    def cut(self, length: int | None) -> "Generated":
        """Without the ends that fill a window behind a text whose length was asked for."""
        tokens, written = self.samples.tokens[:, :length], self.written[:, :length]
        return Generated(replace(self.samples, tokens=tokens), written)


def generate(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    engine: Engine,
    *,
    device: torch.device,
    callback: Callback | None = None,
) -> Generated:
    """Draw what is asked for, batch by batch."""
    sampler = find_sampler(request.sampler, config.kind)
    mask_id = mask_symbol(config)
    settings = DrawOptions(
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        measure_path=request.measure_path,
    )
    rows, extra = _rows(request, config, tokenizer, engine.denoiser, device)
    parts, starts = [], []
    for first in range(0, len(rows), request.batch_size):
        chunk = rows[first : first + request.batch_size]
        samples = torch.tensor([row.sample for row in chunk]).to(device, non_blocking=True)
        given = stack([row.tokens for row in chunk], device)
        canvas = Canvas(given, mask_id, samples, masks=config.masks)
        call = Call(engine, State(canvas, settings, callback), request.steps)
        part = sampler(call, request.options)
        log_prob, drawn_first = part.log_prob, [row.log_prob for row in chunk]
        if log_prob is not None and any(drawn_first):
            log_prob = log_prob + log_prob.new_tensor(drawn_first)
        parts.append(replace(part, passes=part.passes + extra / len(rows), log_prob=log_prob))
        starts.append(canvas.open)
    width = max(p.tokens.shape[1] for p in parts)
    tokens = [_widen(p.tokens, width, PAD) for p in parts]
    drawn = join([replace(p, tokens=t) for p, t in zip(parts, tokens, strict=True)])
    return Generated(drawn, torch.cat([_widen(start, width, False) for start in starts]))


def mask_symbol(config: ModelConfig) -> int:
    """The id that marks a position to write; uniform-state models have no mask to lend it."""
    return config.vocab_size if config.mask_id is None else config.mask_id


@dataclass(frozen=True, slots=True)
class Row:
    """Where a sample starts."""

    sample: int
    """Its index within the seed."""
    tokens: list[int]
    """What is given, and masks."""
    log_prob: float = 0.0
    """Of what was drawn to lay it out: the length of a text."""


PROMPT_STRIDE = 1 << 32
"""Sample i of prompt k has index i + k * PROMPT_STRIDE, however many samples there are."""


def _rows(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    denoiser: Denoiser | None,
    device: torch.device,
) -> tuple[list[Row], int]:
    """One row per sample, and the forward passes it took to choose them."""
    if request.tokens is not None:
        return list(_given(request.tokens, request.num, config)), 0
    if request.infill is not None:
        return _filled(request, config, tokenizer, denoiser, device)
    return list(_framed(request, config, tokenizer)), 0


def _framed(request: Request, config: ModelConfig, tokenizer: Tokenizer | None) -> Iterator[Row]:
    """Masks after a prompt and before a suffix; then the end, if texts have their own windows."""
    length = config.length if request.length is None else request.length
    if length > config.length:
        raise UserError(f"length is {length}: this model writes 1 to {config.length} tokens.")
    ending = _ending(config)
    law = ending.law if ending and request.length is None else None
    prompts = [request.prompt] if isinstance(request.prompt, str) else (request.prompt or [""])
    after = _encode(request.suffix or "", tokenizer)
    for k, text in enumerate(prompts):
        before = _encode(text, tokenizer)
        if len(before) + len(after) >= length:
            raise UserError(
                f"The prompt has {len(before) + len(after)} tokens, the window {length}: "
                "nothing is left to write. Shorten it or raise length."
            )
        given = len(before) + len(after)
        samples = torch.arange(request.num) + k * PROMPT_STRIDE
        lengths, log_prob = torch.full_like(samples, length), torch.zeros(request.num)
        if law is not None:
            numbers = uniforms(request.seed, samples, (Purpose.LENGTH,), 1).squeeze(1)
            lengths = law.draw(numbers, shortest=given + 1)
            log_prob = law.log_prob(lengths, shortest=given + 1)
        drawn = zip(samples.tolist(), lengths.tolist(), log_prob.tolist(), strict=True)
        for sample, count, log_p in drawn:
            masks = [mask_symbol(config)] * (count - given)
            row = [*before, *masks, *after]
            yield Row(sample, ending.fill(row) if ending else row, log_p)


def _ending(config: ModelConfig) -> Ending | None:
    """How a masked model's texts end, where they have windows of their own."""
    if config.end_id is None or config.kind != "mdlm":
        return None
    return Ending(LengthLaw(config.lengths), config.end_id, config.length)


def _filled(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    denoiser: Denoiser | None,
    device: torch.device,
) -> tuple[list[Row], int]:
    """Texts with gaps."""
    if config.kind == "ar" or denoiser is None:
        raise UserError("An AR model writes from left to right and cannot fill gaps: use prompt.")
    gap = parse_gap(request.gap or "auto")
    if config.kind == "duo" and gap.chosen:
        raise UserError(
            "A uniform-state model cannot choose the length of a gap: give gap as 8 or 4-12."
        )
    pieces = [_encode(piece, tokenizer) for piece in split_infill(request.infill or "")]
    template = Template(pieces, [gap] * (len(pieces) - 1), _ending(config)).fit(config.length)
    samples = torch.arange(request.num, device=device)
    eot_id = None if tokenizer is None else tokenizer.eot_id
    mask_id = mask_symbol(config)
    chosen, passes = gap_lengths(
        template, denoiser, mask_id, request.seed, samples, eot_id, config.masks
    )
    rows = [Row(i, template.lay_out(lengths, mask_id)) for i, lengths in enumerate(chosen)]
    return rows, passes


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if not text:
        return []
    if tokenizer is None:
        raise UserError("This model has no tokenizer: give token ids as `tokens`.")
    try:
        return tokenizer.encode([text])[0]
    except UserError:
        unknown = ", ".join(f"`{word}`" for word in text.split() if word not in tokenizer)
        if not unknown:
            raise
        raise UserError(f"The model's vocabulary has no {unknown}: use words it knows.") from None


def _given(tokens: Tensor, num: int, config: ModelConfig) -> Iterator[Row]:
    mask_id = mask_symbol(config)
    table = tokens if tokens.ndim == 2 else tokens[None]
    fits = table.ndim == 2 and table.numel() and table.shape[1] <= config.length
    if not fits or bool(((table != PAD) & ((table < 0) | (table > mask_id))).any()):
        raise UserError(
            f"tokens are (L,) or (B, L) ids of 0..{mask_id} with L up to {config.length}."
        )
    for k, row in enumerate(table.tolist()):
        for i in range(num):
            yield Row(i + k * PROMPT_STRIDE, row)


def _widen(table: Tensor, width: int, value: int | bool) -> Tensor:
    if table.shape[1] == width:
        return table
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)


def to_text(tokens: Tensor, tokenizer: Tokenizer, written: Tensor | None = None) -> list[str]:
    """Decode samples: what was written ends at its first end-of-text, if nothing is given after."""
    marks = [None] * len(tokens) if written is None else written.tolist()
    return [
        tokenizer.decode(output_ids(row, tokenizer.eot_id, mark))
        for row, mark in zip(tokens.tolist(), marks, strict=True)
    ]
