"""From a wish ("four stories, 16 steps, beginning so") to canvases, a sampler and samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from didi_instruct.api.samplers import Call, Engine, find_sampler
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.sampling.chain import PAD, Callback, Canvas, Denoiser, Draw, Samples, join
from didi_instruct.sampling.prompts import (
    Template,
    fit,
    gap_lengths,
    lay_out,
    parse_gap,
    split_infill,
    stack,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to generate, and how."""

    num: int = 1
    """Samples; with several prompts, samples of each."""
    steps: int = 16
    length: int | None = None
    """Tokens of the window, what is given included; by default all the model can read."""
    sampler: str | None = None
    """By default the plain one of the model's kind."""
    prompt: str | Sequence[str] | None = None
    """Text that comes first; several texts are continued in one batch."""
    suffix: str | None = None
    """Text that ends the window."""
    infill: str | None = None
    """Text with gaps, `Once ___ time`; the window is then as long as the text."""
    gap: str = "auto"
    """Tokens of a gap: `8`, `4-12`, or `auto`, `auto:4-12` for the model to choose."""
    tokens: Tensor | None = None
    """Given tokens anywhere, (L,) or (B, L), the mask's id where to write."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sampler by name."""

    def __post_init__(self) -> None:
        """Refuse wishes that contradict themselves."""
        for name in ("num", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use 1 or more.")
        if self.infill is not None and (self.prompt is not None or self.suffix is not None):
            raise UserError("infill holds all that is given: leave out prompt and suffix.")
        if self.tokens is not None and (self.infill or self.prompt or self.suffix):
            raise UserError("tokens hold all that is given: leave out prompt, suffix and infill.")

    @property
    def open_ended(self) -> bool:
        """Whether nothing is given after what is written, so that a text may end early."""
        return self.suffix is None and self.infill is None and self.tokens is None


def generate(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    engine: Engine,
    *,
    device: torch.device,
    callback: Callback | None = None,
) -> Samples:
    """Draw what is asked for, batch by batch."""
    sampler = find_sampler(request.sampler, config.kind)
    mask_id = mask_symbol(config)
    settings = Draw(
        seed=request.seed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    rows = list(_rows(request, config, tokenizer, engine.denoiser, device))
    parts = []
    for first in range(0, len(rows), request.batch_size):
        chunk = rows[first : first + request.batch_size]
        samples = torch.arange(first, first + len(chunk), device=device)
        canvas = Canvas(stack(chunk, device), mask_id, samples)
        call = Call(engine, canvas, settings, request.steps, callback)
        parts.append(sampler(call, request.options))
    return join(_same_width(parts))


def mask_symbol(config: ModelConfig) -> int:
    """The id that marks a position to write; uniform-state models have no mask to lend it."""
    return config.vocab_size if config.mask_id is None else config.mask_id


def _rows(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    denoiser: Denoiser,
    device: torch.device,
) -> Iterator[list[int]]:
    """One row of given tokens and masks per sample."""
    mask_id = mask_symbol(config)
    length = config.length if request.length is None else request.length
    if not 1 <= length <= config.length:
        raise UserError(f"length is {length}: this model writes 1 to {config.length} tokens.")
    if request.tokens is not None:
        yield from _given(request.tokens, request.num, config, mask_id)
        return
    if request.infill is not None:
        template = fit(_template(request, tokenizer), config.length)
        samples = torch.arange(request.num, device=device)
        for lengths in gap_lengths(template, denoiser, mask_id, request.seed, samples):
            yield lay_out(template, lengths, mask_id)
        return
    prompts = [request.prompt] if isinstance(request.prompt, str) else (request.prompt or [""])
    after = _encode(request.suffix or "", tokenizer)
    for text in prompts:
        before = _encode(text, tokenizer)
        if len(before) + len(after) >= length:
            raise UserError(
                f"The prompt has {len(before) + len(after)} tokens, the window {length}: "
                "nothing is left to write. Shorten it or raise length."
            )
        masks = [mask_id] * (length - len(before) - len(after))
        yield from [[*before, *masks, *after]] * request.num


def _template(request: Request, tokenizer: Tokenizer | None) -> Template:
    gap = parse_gap(request.gap)
    pieces = [_encode(piece, tokenizer) for piece in split_infill(request.infill or "")]
    template: Template = [pieces[0]]
    for piece in pieces[1:]:
        template += [gap, piece]
    return template


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if not text:
        return []
    if tokenizer is None:
        raise UserError("This model has no tokenizer: give token ids as `tokens`.")
    return tokenizer.encode([text])[0]


def _given(tokens: Tensor, num: int, config: ModelConfig, mask_id: int) -> Iterator[list[int]]:
    table = tokens if tokens.ndim == 2 else tokens[None]
    outside = (table != PAD) & ((table < 0) | (table > mask_id))
    if table.ndim != 2 or not 1 <= table.shape[1] <= config.length or bool(outside.any()):
        raise UserError(
            f"tokens are (L,) or (B, L) ids of 0..{mask_id} with L up to {config.length}."
        )
    for row in table.tolist():
        yield from [row] * num


def _same_width(parts: list[Samples]) -> list[Samples]:
    """Pad the tokens of batches of other widths."""
    width = max(p.tokens.shape[1] for p in parts)
    return [
        Samples(
            torch.nn.functional.pad(p.tokens, (0, width - p.tokens.shape[1]), value=PAD),
            p.log_prob,
            p.nfe,
            p.passes,
            p.disc_calls,
        )
        for p in parts
    ]


def to_text(tokens: Tensor, tokenizer: Tokenizer, *, open_ended: bool = True) -> list[str]:
    """Decode samples without padding; an open-ended one stops at end-of-text, once begun."""
    texts = []
    for row in tokens.tolist():
        ids = [token for token in row if token != PAD]
        if open_ended:
            while ids and ids[0] == tokenizer.eot_id:
                ids = ids[1:]
        else:
            ids = [token for token in ids if token != tokenizer.eot_id]
        texts.append(tokenizer.decode(ids, stop_at_eot=open_ended))
    return texts
