"""Rows of prompts with answers, in a shuffled order that is a pure function.

Rows are (B, 2, L) as `training.answers` has them. Row i of the stream depends on (seed, i) alone.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from didi_instruct.data.dataset import shuffled
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.tasks.encoding import Encoded, fit
from didi_instruct.training.answers import ANSWER, GIVEN, PADDING

TOKEN = np.dtype("<u4")
ROW = np.dtype([("start", "<i8"), ("prompt", "<i4"), ("answer", "<i4"), ("key", "<u8")])
"""Where a row begins among the tokens, how many tokens prompt and answer have, and the hash of the
prompt by which rows are held out."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of a prompt and its answer that a model reads."""

    length: int
    """Tokens that it reads at once."""
    long: Literal["cut", "refuse", "drop"] = "cut"
    """Of rows that do not fit, the prompt is cut from the left, or, where there is none, the text
    from the right; or they are refused, or left out."""
    end: int | None = None
    """Token to learn as the last of each answer; None: the answer alone."""
    fill: int | None = None
    """Token that fills the window after the answer, given as the prompt is; None: rows end with
    their answers."""
    banned: frozenset[int] = frozenset()
    """Tokens that it never writes."""
    skips: bool = False
    """Tokens that it never writes are given, not learnt; else answers with them are refused."""

    def fit(self, encoded: Encoded, where: str, tokenizer: Tokenizer) -> tuple[Encoded, bool]:
        """Return what the model reads, and whether something was cut; no answer: left out."""
        answer = encoded.answer + ([] if self.end is None else [self.end])
        if not encoded.answer:
            raise UserError(f"{where}: `answer` has no tokens of its own: take the row out.")
        never = self.banned.intersection(encoded.answer)
        if never and not self.skips:
            word = tokenizer.decode([min(never)])
            raise UserError(
                f"{where}: `answer` has the token {word!r}, which this model never writes: reword "
                "it, or take the row out."
            )
        over = len(encoded.prompt) + len(answer) - self.length
        if (self.long == "drop" and over > 0) or self.banned.issuperset(answer):
            return Encoded([], []), False
        if not encoded.prompt:
            return self._text(answer, where)
        fitted = fit(Encoded(encoded.prompt, answer), self.length, where)
        if over > 0 and self.long == "refuse":
            raise UserError(
                f"{where}: prompt and answer have {self.length + over} tokens, and the model reads "
                f"{self.length}: shorten the prompt, or cut it with answers.long=cut."
            )
        return fitted, over > 0

    def _text(self, answer: list[int], where: str) -> tuple[Encoded, bool]:
        """A row without a prompt."""
        over = len(answer) > self.length
        if over and self.long == "refuse":
            raise UserError(
                f"{where}: `answer` has {len(answer)} tokens, and the model reads {self.length}: "
                "shorten it, or take the row out."
            )
        return Encoded([], answer[: self.length]), over


class AnswerRows:
    """Some rows of a prepared folder as a stream: a `TokenSource` whose rows are (B, 2, L).

    L is the length of the longest row that was asked for, so little is computed on padding.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        index: np.ndarray,
        tokenizer: Tokenizer,
        window: Window,
        *,
        seed: int = 0,
        fingerprint: str = "",
    ) -> None:
        """Read the rows of `index`, in its order, from `tokens`."""
        self._tokens, self._index, self._window = tokens, index, window
        self._counts = index["prompt"].astype(np.int64) + index["answer"]
        self.tokenizer, self.seed, self.fingerprint = tokenizer, seed, fingerprint
        self.num_tokens: int = tokenizer.size
        self.num_sequences: int = len(index)
        self.length: int = window.length if window.fill is not None else int(self._counts.max())

    def __repr__(self) -> str:
        return f"AnswerRows({self.num_sequences} rows of up to {self.length} tokens)"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows of 0, 1, 2, ... tokens, up to the whole window."""
        return tuple(np.bincount(self._counts, minlength=self._window.length + 1).tolist())

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Return rows start .. start + count - 1 of the shuffled stream, (count, 2, L), int64."""
        return self._gather(shuffled(start, count, self.num_sequences, self.seed))

    def ordered(self, start: int, count: int) -> torch.Tensor:
        """Return rows in their own order, for evaluation; fewer at the end."""
        return self._gather(np.arange(start, min(start + count, self.num_sequences)))

    def _gather(self, indices: np.ndarray) -> torch.Tensor:
        window, counts = self._window, self._counts[indices]
        length = int(counts.max()) if window.fill is None else window.length
        found = np.empty((len(indices), 2, length), np.int64)
        found[:, 0] = 0 if window.fill is None else window.fill
        found[:, 1] = PADDING if window.fill is None else GIVEN
        for row, (entry, count) in enumerate(zip(self._index[indices], counts, strict=True)):
            found[row, 0, :count] = self._tokens[entry["start"] : entry["start"] + count]
            found[row, 1, : entry["prompt"]] = GIVEN
            found[row, 1, entry["prompt"] : count] = ANSWER
        if window.skips:
            never = np.isin(found[:, 0], sorted(window.banned)) & (found[:, 1] == ANSWER)
            found[:, 1][never] = GIVEN
        return torch.from_numpy(found)
