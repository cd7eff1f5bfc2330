"""Samples on disk: what was drawn, from what and how, so that a metric can be computed again.

A file of samples is JSON lines: first what they are samples of, then one sample per line: text,
tokens and the log-probability of its path.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didi_instruct.data.files import no_space_as_user_error, write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError, first_line

FORMAT, VERSION = "didi-samples", 4
"""Version 1 did not say with what options, in what batches and on what device it was drawn, version
2 knew no texts with windows of their own, and in version 3 RGAS scored what fills a window too."""
HEAD_BYTES = 1 << 16
"""More than the first line of a file of samples has."""
OF_TEXT = "text"
"""Stands for the sampler where nobody sampled."""
REAL, SHUFFLED = "real", "shuffled"
"""Names of the rows of real chains, and of those with their residues shuffled."""
TEXT, NUMBER, NONE = (str,), (int, float), (type(None),)
KINDS: dict[tuple[type, ...], tuple[str, ...]] = {
    TEXT: ("model", "fingerprint", "sampler"),
    TEXT + NONE: ("tokenizer", "device", "dtype"),
    NUMBER: (
        "steps", "nfe", "passes", "disc_calls", "temperature", "top_p", "seed", "length",
    ),
    NUMBER + NONE: ("seconds", "batch_size"),
    (bool,): ("until_eot", "own_window"),
    (dict, *NONE): ("options",),
}  # fmt: skip
"""Types of the entries of the first line."""
LEFT_TO_RIGHT = "autoregressive"
"""The sampler that stops where a text ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Origin of samples: everything that tells two rows of a table apart."""

    model: str
    """The SOURCE it was loaded from."""
    fingerprint: str
    """Of the model's weights."""
    tokenizer: str | None
    """Hash of the tokenizer."""
    sampler: str
    steps: int
    nfe: int
    passes: float
    disc_calls: int
    temperature: float
    top_p: float
    seed: int
    length: int
    until_eot: bool = False
    """A text ends at its end-of-text; else it fills the window."""
    seconds: float | None = None
    """Time of drawing, where it was measured."""
    options: Mapping[str, Any] | None = None
    """All settings of the sampler, as JSON has them; None where they are not known."""
    batch_size: int | None = None
    """Texts drawn together, which share passes: `passes` and `seconds` depend on it."""
    device: str | None = None
    """Where they were drawn, on which `seconds` depends too."""
    dtype: str | None = None
    """Type that the weights were rounded to; None: not rounded."""
    own_window: bool = False
    """The length of each text was drawn first and the rest of its window filled with its
    end, so that `log_prob` is that of a text and its end."""

    @classmethod
    def of_text(
        cls, name: str, tokenizer: str | None, length: int, *, until_eot: bool = False
    ) -> "Origin":
        """Origin of texts that nobody sampled, in windows of `length`."""
        return cls(
            model=name,
            fingerprint="",
            tokenizer=tokenizer,
            sampler=OF_TEXT,
            steps=0,
            nfe=0,
            passes=0.0,
            disc_calls=0,
            temperature=1.0,
            top_p=1.0,
            seed=0,
            length=length,
            until_eot=until_eot,
        )

    @property
    def ends_with_text(self) -> bool:
        """True if nothing was written after an end, so that a path is that of text and end."""
        return self.own_window or self.sampler == LEFT_TO_RIGHT


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Samples of one model in one setting."""

    origin: Origin
    tokens: Tensor
    """(N, L) int64, on the CPU."""
    texts: tuple[str, ...]
    log_prob: Tensor | None
    """(N,) float64, of the path; None where it has no probability, or none was asked for."""
    lengths: Tensor
    """(N,) tokens that count, from the first."""

    def __post_init__(self) -> None:
        """Refuse a set whose parts do not belong together."""
        sizes = {len(self.tokens), len(self.texts), len(self.lengths)}
        if len(sizes) != 1 or (self.log_prob is not None and len(self.log_prob) not in sizes):
            raise ValueError("tokens, texts, lengths and log-probabilities differ in number")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.texts)

    def first(self, num: int) -> "SampleSet":
        """The first samples."""
        log_prob = None if self.log_prob is None else self.log_prob[:num]
        return SampleSet(
            self.origin, self.tokens[:num], self.texts[:num], log_prob, self.lengths[:num]
        )


def text_lengths(tokens: Tensor, eot_id: int | None, until_eot: bool) -> Tensor:
    """Tokens of each text (B, L) that count: all, or those before the first end-of-text: (B,)."""
    full = torch.full((len(tokens),), tokens.shape[1])
    if not until_eot or eot_id is None:
        return full
    ends = tokens == eot_id
    return torch.where(ends.any(1), ends.int().argmax(1), full)


def texts_of(
    tokenizer: Tokenizer | None, tokens: Tensor, until_eot: bool, end_id: int | None = None
) -> tuple[tuple[str, ...], Tensor]:
    """Texts of the tokens (B, L) that count, which judges of texts read, and their number (B,).

    `end_id` ends a text where the model has one; else the tokenizer's end-of-text does.
    """
    lengths = text_lengths(tokens, end_of_text(tokenizer, end_id), until_eot)
    if tokenizer is None:
        return ("",) * len(tokens), lengths
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return tuple(tokenizer.decode_batch([row[:end] for row, end in rows])), lengths


def end_of_text(tokenizer: Tokenizer | None, end_id: int | None) -> int | None:
    """Id that ends a text: the model's own `end_id`, else its tokenizer's end-of-text."""
    return tokenizer.eot_id if end_id is None and tokenizer is not None else end_id


def with_end(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of each text (B, L) and the one that ends it, if its window has room for it: (B,)."""
    return (lengths + 1).clamp(max=tokens.shape[1])


def constant_after_end(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Tokens (B, L) with all that follows a text (its length (B,)) overwritten by its end-of-text.

    So networks that read whole windows see the text and where it ends, and nothing else.
    """
    width = tokens.shape[1]
    end = tokens.gather(1, lengths.clamp(max=width - 1)[:, None])
    return torch.where(torch.arange(width) > lengths[:, None], end, tokens)


def write_samples(path: Path, samples: SampleSet) -> None:
    """Write samples to a file, whole or not at all."""
    lines: list[dict[str, Any]] = [{"format": FORMAT, "version": VERSION, **asdict(samples.origin)}]
    log_prob = [None] * len(samples) if samples.log_prob is None else samples.log_prob.tolist()
    rows = zip(
        samples.tokens.tolist(), samples.lengths.tolist(), samples.texts, log_prob, strict=True
    )
    for tokens, length, text, log_p in rows:
        lines.append({"text": text, "log_prob": log_p, "length": length, "tokens": tokens})
    with no_space_as_user_error(path):
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def is_sample_file(path: Path) -> bool:
    """True if the first line of a file says that samples follow."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(HEAD_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def read_samples(path: Path) -> SampleSet:
    """Read what `write_samples` wrote; what an older version did not say is None."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    if not is_sample_file(path):
        raise UserError(
            f"{path} is not a file of samples: `didi eval` keeps those it draws in its folder, "
            "under samples/."
        )
    try:
        head = json.loads(lines[0])
        head.pop("format")
        if head.pop("version", None) not in range(1, VERSION + 1):
            raise UserError(f"{path} was written by a newer version of didi-instruct: upgrade it.")
        rows = [json.loads(line) for line in lines[1:]]
        return _build(head, rows)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}.") from None


def _build(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> SampleSet:
    known = {f.name for f in fields(Origin)}
    if unknown := sorted(set(head) - known):
        raise ValueError(f"`{unknown[0]}` is not known")
    if not rows:
        raise ValueError("it holds no samples")
    for kinds, names in KINDS.items():
        for name in names:
            if name not in head:
                continue  # an older version did not tell
            value = head[name]
            if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
                raise ValueError(f"`{name}` is {value!r}")
    log_prob = [row["log_prob"] for row in rows]
    if not all(value is None or math.isfinite(value) for value in log_prob):
        raise ValueError("a `log_prob` is not a finite number")
    tokens = torch.tensor([row["tokens"] for row in rows])
    lengths = torch.tensor([row["length"] for row in rows])
    if tokens.dtype != torch.long or tokens.ndim != 2 or bool((tokens < 0).any()):
        raise ValueError("`tokens` are not ids of one window a sample")
    if lengths.dtype != torch.long or not bool(
        ((lengths >= 0) & (lengths <= tokens.shape[1])).all()
    ):
        raise ValueError("a `length` is not one of the window's")
    return SampleSet(
        Origin(**head),
        tokens,
        tuple(str(row["text"]) for row in rows),
        None if None in log_prob else torch.tensor(log_prob, dtype=torch.float64),
        lengths,
    )
