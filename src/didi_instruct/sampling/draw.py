"""Random numbers that belong to a sample, and exact draws of tokens by them.

Every number is a hash of (seed, sample, stream, position), so a sample has the same noise in any
batch, in any order, on any device. One float64 number draws one token by inverting the cumulative
law: float32 Gumbel noise would truncate the tail and so fake a lower temperature.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.compile import Fused, fuses
from didi_instruct.transfer import sent

GREEDY = 1e-8  # lower temperatures count as 0: logits divided by them would overflow
LAW_ELEMENTS = 2**24  # entries of float64 laws over the vocabulary that are held at a time
NOISE_ELEMENTS = 2**21  # random numbers that are made at a time
CHUNK = 64  # tokens of the vocabulary whose probabilities are summed together
LOWEST = torch.finfo(torch.float64).min  # below all logits, where -inf minus itself would be NaN

Sums = Callable[[Tensor], tuple[Tensor, Tensor]]


class Purpose(IntEnum):
    """First number of a random stream. Frozen: other numbers would be other samples."""

    REVEAL = 0
    TOKEN = 1
    SELECT = 2
    REMASK = 3
    ORDER = 4
    START = 5
    BLOCK = 6
    CODE = 7
    LENGTH = 8
    DROPOUT = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOptions:
    """Seed of the noise, and restrictions of the law that tokens are drawn from."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    measure_path: bool = True
    """Sum a step's code out of its log-probability, where a model has codes: one more pass per
    code, which is not counted. Without it such a model's path has no known probability."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}: use 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: use more than 0, and at most 1.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: use 1 or more.")

    @property
    def restricted(self) -> bool:
        """True unless tokens are drawn from the denoiser's own law."""
        return self.temperature != 1 or self.top_p != 1 or self.top_k is not None


PLAIN = DrawOptions()


# Noise

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def uniforms(seed: int, samples: Tensor, stream: Sequence[int | Tensor], count: int) -> Tensor:
    """Uniform float64 numbers in [0, 1) with 53 random bits: samples (B,) -> (B, count).

    Times any x > 0 they stay below x, rounded too: the largest is 1 - 2^-53.

    `stream` names the use: (purpose, step, …), any whole numbers. Tensors of them broadcast against
    (B, count): (N, 1, 1) for N steps gives (N, B, count), (B, count) a step for each position.
    """
    position = torch.arange(1, count + 1, device=samples.device)
    turns = [_GOLDEN * (number + 1) for number in stream]
    numbers = [turn if isinstance(turn, Tensor) else _signed(turn) for turn in turns]
    numbers.insert(0, _signed(_hash_number(seed)))
    if fuses(samples) and not any(isinstance(number, Tensor) for number in numbers):
        # As a tensor, so that other numbers do not compile anew.
        return _fused(samples, sent(torch.tensor(numbers), samples.device), position)
    return _uniforms(samples, numbers, position)


def _uniforms(samples: Tensor, numbers: Sequence[int | Tensor], position: Tensor) -> Tensor:
    """SplitMix64's finaliser over seed, sample, stream and position in turn."""
    key = _hash(numbers[0] + _GOLDEN * (samples[:, None] + 1))
    for number in numbers[1:]:
        key = _hash(key + number)
    bits = _hash(key + _GOLDEN * position)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _uniforms_of(samples: Tensor, numbers: Tensor, position: Tensor) -> Tensor:
    return _uniforms(samples, numbers.unbind(), position)


_fused: Fused[[Tensor, Tensor, Tensor], Tensor] = Fused(_uniforms_of, "Noise")


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _hash_number(number: int) -> int:
    """`_hash` of one number, without a tensor."""
    x, whole = number % (1 << 64), (1 << 64) - 1
    x = (x ^ (x >> 30)) * _FIRST & whole
    x = (x ^ (x >> 27)) * _SECOND & whole
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right filling with zeros; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Wrap a whole number into a signed 64-bit one, as torch does with tensors."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number


@dataclass(frozen=True)
class Noise:
    """All random numbers of some samples."""

    seed: int
    samples: Tensor  # (B,) index of each sample within the seed
    stream: tuple[int, ...] = ()  # first numbers of all streams; blocks of a text differ in them
    device: torch.device | None = None
    """Where the numbers are made, which are the same everywhere; None: where `samples` are."""

    def uniforms(self, count: int, *stream: int | Tensor) -> Tensor:
        """(B, count) numbers in [0, 1), or as `stream` broadcasts."""
        return uniforms(self.seed, self._there, (*self.stream, *stream), count)

    def of_groups(self, size: int) -> "Noise":
        """The noise of groups of consecutive samples, one index for each."""
        return replace(self, samples=self.samples[::size] // size) if size > 1 else self

    @property
    def planned(self) -> "Noise":
        """Noise of the same numbers, made where `samples` are: on the host, for plans."""
        return replace(self, device=None)

    @cached_property
    def _there(self) -> Tensor:
        return self.samples if self.device is None else sent(self.samples, self.device)

    def of_steps(
        self, purpose: Purpose, steps: range, count: int, candidates: int = 1
    ) -> Iterator[Tensor]:
        """(N, M, B, count) numbers of M candidates in each step, for some N steps at a time.

        The first candidate has those of a step without candidates, the others add their number to
        the stream.
        """
        device = self.samples.device
        each = max(1, NOISE_ELEMENTS // max(1, candidates * len(self.samples) * count))
        others = torch.arange(1, candidates, device=device)[:, None, None]
        for first in range(steps.start, steps.stop, each):
            last = min(first + each, steps.stop)
            some = torch.arange(first, last, device=device)[:, None, None, None]
            made = self.uniforms(count, purpose, some)
            if candidates > 1:
                made = torch.cat([made, self.uniforms(count, purpose, some, others)], 1)
            yield made


# Laws


def law_of(logits: Tensor, options: DrawOptions = PLAIN) -> Tensor:
    """Log-probabilities in float64 after temperature, then top-k, then top-p, renormalised.

    top_p keeps the smallest set of most probable tokens whose probability reaches top_p; at
    temperature 0 only the most probable token is left.

    Shapes: logits (..., V) -> (..., V).
    """
    logits = logits.double()
    if options.temperature < GREEDY:
        best, place = logits.max(-1, keepdim=True)
        # `best - best` is 0, or NaN where the logits are: then all are, so that no choice passes.
        return torch.full_like(logits, -torch.inf).scatter_(-1, place, 0.0) + (best - best)
    log_p = torch.log_softmax(logits / options.temperature, -1)
    if options.top_k is not None and options.top_k < log_p.shape[-1]:
        kept, place = log_p.topk(options.top_k, -1)
        log_p = torch.full_like(log_p, -torch.inf).scatter_(-1, place, kept).log_softmax(-1)
    if options.top_p < 1:
        ordered, index = log_p.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = ordered.masked_fill(before >= options.top_p, -torch.inf)
        log_p = torch.empty_like(log_p).scatter_(-1, index, kept).log_softmax(-1)
    return log_p


def in_parts(logits: Tensor, *companions: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of logits (R, V) and of their companions (R, …), as many as `LAW_ELEMENTS` allows."""
    rows = max(1, LAW_ELEMENTS // logits.shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in (logits, *companions)), strict=True)


# Draws


def draw_tokens(
    logits: Tensor, u: Tensor, row: Tensor | None = None, options: DrawOptions = PLAIN
) -> tuple[Tensor, Tensor]:
    """Draw tokens by numbers u (N,) in [0, 1) from the laws of logits (R, V).

    Draw i uses logits row[i]; without `row`, row i. Returns tokens and their log-probabilities,
    (N,) both.
    """
    if not options.restricted and (row is not None or logits.is_cuda):
        return draw_by_chunks(logits, u, _sums, row)
    tokens, log_ps = [], []
    for part, numbers in in_parts(logits if row is None else logits[row], u):
        law = law_of(part, options)
        token = invert(law, numbers)
        tokens.append(token)
        log_ps.append(law.gather(-1, token[:, None]).squeeze(-1))
    return torch.cat(tokens), torch.cat(log_ps)


def log_prob_of(logits: Tensor, tokens: Tensor, options: DrawOptions) -> Tensor:
    """Log-probabilities (N,) of tokens (N,) under the laws that logits (N, V) are drawn from."""
    parts = in_parts(logits, tokens[:, None])
    return torch.cat([law_of(part, options).gather(-1, own) for part, own in parts]).squeeze(-1)


def invert(log_p: Tensor, u: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds u: log_p (R, V) float64, u (R,) -> (R,)."""
    cumulative = log_p.exp().cumsum(-1)
    # `right`: the first token whose sum exceeds the target, so never one of probability 0.
    target = u[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return token.clamp(max=log_p.shape[-1] - 1)


def chunk_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit, and sums of exp(logit - largest) over chunks: (R, V) -> (R, 1), (R, K).

    Each chunk is summed by its own largest logit first, so that all logits are read once.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
    chunks = padded.view(len(logits), padded.shape[1] // CHUNK, CHUNK)
    tops = chunks.amax(-1).double().clamp(min=LOWEST)
    sums = (chunks.double() - tops[..., None]).exp().sum(-1)
    top = tops.amax(-1, keepdim=True)
    return top, sums * (tops - top).exp()


def draw_by_chunks(
    logits: Tensor, u: Tensor, sums_of: Sums = chunk_sums, row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`invert` from softmax(logits) without float64 laws over the vocabulary.

    Probabilities are summed in float64 by chunks; the number picks the chunk, then the token within
    it. Tokens are those of `invert` unless the number lies within rounding of a border. `row` (N,)
    names the row of each draw. Maxima and minima pick what stands in a row, so that compiled the
    choice of a chunk is one kernel and that of a token another. A GPU's parallel sums may fall by
    their last bits where nothing is added: a token without probability is never chosen.

    Shapes: logits (R, V), u (N,) -> (N,), (N,).
    """
    num = logits.shape[1]
    top, sums = sums_of(logits)
    until = sums.cumsum(-1)
    if row is not None:
        top, sums, until = top[row], sums[row], until[row]
    total = until.amax(-1, keepdim=True)
    target = u[:, None] * total
    chunk = _first(until > target, sums > 0)
    number = torch.arange(until.shape[1], device=logits.device)
    rest = target - torch.where(number < chunk, until, 0.0).amax(-1, keepdim=True)
    columns = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    inside = _pick(logits, row, columns.clamp(max=num - 1)).double() - top
    inside = inside.masked_fill(columns >= num, -torch.inf).exp()
    # Two ways to add up the same numbers round differently; the chunk has some probability.
    place = _first(inside.cumsum(-1) > rest, inside > 0)
    token = (chunk * CHUNK + place).clamp(max=num - 1)
    log_p = _pick(logits, row, token).double() - top - total.log()
    return token.squeeze(1), log_p.squeeze(1)


def _first(exceeds: Tensor, possible: Tensor) -> Tensor:
    """Number of the first place (R, N) that exceeds and is possible, else of the last: (R, 1)."""
    count = exceeds.shape[1]
    number = torch.arange(count, device=exceeds.device)
    last = torch.where(possible, number, 0).amax(-1, keepdim=True)
    first = torch.where(exceeds & possible, number, count).amin(-1, keepdim=True)
    return torch.minimum(first, last)


def _pick(logits: Tensor, row: Tensor | None, columns: Tensor) -> Tensor:
    """Some columns (N, C) of each draw's row."""
    return logits.gather(1, columns) if row is None else logits[row[:, None], columns]


def _sums_in_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_sums` part by part: float64 of all rows may not fit into memory."""
    parts = [chunk_sums(part) for (part,) in in_parts(logits)]
    return torch.cat([top for top, _ in parts]), torch.cat([sums for _, sums in parts])


_sums: Fused[[Tensor], tuple[Tensor, Tensor]] = Fused(chunk_sums, "A draw", _sums_in_parts)
