"""Judging texts with a causal language model of `transformers`."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.evaluation.causal_files import file_hash, load_causal, require_causal
from didi_instruct.evaluation.causal_nats import Nats, batches, causal_nats, pad
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.scores import (
    Progress,
    Scores,
    check_settings,
    checked,
    digest,
    told_apart,
)

Bos = Literal["auto", "always", "never"]
Beyond = Literal["cut", "uniform"]


class CausalJudge:
    """Any causal language model of `transformers`: a directory, a hub id or a GGUF file.

    Texts are tokenised anew, without anything added, and read up to `max_length` tokens (the
    model's context if None). What follows is cut, or with `beyond` = `uniform` costs log V a token:
    with a start token that is a proper law of texts of any length, which flatters none. The first
    token is scored only after a start token. `bos` decides about that:
    `auto` does what the model's own tokenizer does (Llama has one; GPT-2, as everyone scores with
    it, has none), `always` and `never` override it. `temperature` divides the logits.

    `end` is the token that ends a text, by name or id: the tokenizer's own if None.

    `collapse_spaces` makes one space of several first: some models were trained on such text alone,
    and have tokens for runs of spaces that they never saw. Nothing in their files tells, so it must
    be asked for.
    """

    exact = False  # another tokenizer, and perhaps not the whole text

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        batch_size: int = 16,
        max_length: int | None = None,
        bos: Bos = "auto",
        temperature: float = 1.0,
        collapse_spaces: bool = False,
        end: str | int | None = None,
        beyond: Beyond = "cut",
        trust_remote_code: bool = False,
    ) -> None:
        name, self.device = str(source), torch.device(device)
        check_settings(batch_size, temperature)
        if beyond not in get_args(Beyond):
            raise UserError(
                f"The judge's beyond is {beyond!r}: use {' or '.join(get_args(Beyond))}."
            )
        self.batch_size, self.temperature = batch_size, temperature
        self.collapse_spaces, self.beyond = collapse_spaces, beyond
        # In half precision the same weights give other numbers, and a judge is read to the digit.
        files, self.tokenizer, self.model = load_causal(source, torch.float32, trust_remote_code)
        self.model.to(self.device).eval()
        require_causal(name, self.model)
        self.start = _start_token(name, self.tokenizer, bos)
        context = _context(self.model.config.get_text_config(), self.tokenizer)
        self.max_length = _max_length(name, max_length, context)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        self.end = _end_token(name, self.tokenizer, end, self.vocabulary)
        unusual = self.end not in (None, self.tokenizer.eos_token_id)
        self.name = told_apart(
            name,
            temperature,
            collapse_spaces,
            self.tokenizer.convert_ids_to_tokens(self.end) if unusual else None,
            self.max_length if beyond == "uniform" else None,
        )
        settings = (self.start, self.max_length, temperature, collapse_spaces, self.end, beyond)
        # In half precision the same weights give other numbers.
        self.fingerprint = digest(*settings, self.model.dtype, *map(file_hash, files))

    def score(
        self, samples: SampleSet, progress: Progress | None = None, *, ending: bool = False
    ) -> Scores:
        """Score the texts, each from its first token on (or its second: see the class).

        With `ending`, those that end before their window have their end scored as well.
        """
        if ending:
            return checked(self.name, self.score_both(samples, progress)[1])
        texts = self._encode(samples.texts)
        return checked(self.name, self._priced(texts, self._nats(texts, progress).total))

    def score_both(
        self, samples: SampleSet, progress: Progress | None = None
    ) -> tuple[Scores, Scores]:
        """Score the texts, and the texts with their ends, by reading them once."""
        texts = self._encode(samples.texts)
        ended = self._ended(texts, samples)
        nats = self._nats(ended, progress)
        read = [self._row(plain) != self._row(ids) for plain, ids in zip(texts, ended, strict=True)]
        without = torch.where(torch.tensor(read), nats.before, nats.total)
        return self._priced(texts, without), self._priced(ended, nats.total)

    def _row(self, ids: list[int]) -> list[int]:
        """What is read of a text: its beginning, after the start token."""
        return ([] if self.start is None else [self.start]) + ids[: self.max_length]

    def _nats(self, texts: Sequence[list[int]], progress: Progress | None) -> Nats:
        return causal_nats(
            lambda ids, real: self.model(ids, attention_mask=real, use_cache=False).logits,
            [self._row(ids) for ids in texts],
            num_tokens=self.vocabulary,
            temperature=self.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )

    def _priced(self, texts: Sequence[list[int]], nats: Tensor) -> Scores:
        """Scores of texts of which the judge has read what it can, at the price of the rest."""
        rows = [self._row(ids) for ids in texts]
        tokens = torch.tensor([max(len(row) - 1, 0) for row in rows])
        unread = torch.tensor([max(0, len(ids) - (self.max_length or len(ids))) for ids in texts])
        if self.beyond == "uniform":
            nats, tokens = nats + unread * math.log(self.vocabulary), tokens + unread
            unread = torch.zeros_like(unread)
        return Scores(nats, tokens, int((unread > 0).sum()))

    def _ended(self, texts: Sequence[list[int]], samples: SampleSet) -> list[list[int]]:
        """Ids of texts with the token that ends them, where they end before their window."""
        if self.end is None:
            raise UserError(
                f"The judge {self.name} has no token that ends a text: name one with --judge-end."
            )
        ends = (samples.lengths < samples.tokens.shape[1]).tolist()
        return [ids + [self.end] * end for ids, end in zip(texts, ends, strict=True)]

    @torch.no_grad()
    def features(self, texts: Sequence[str], max_tokens: int = 256) -> NDArray[np.float32]:
        """Last hidden state at the last of the first `max_tokens` tokens of each text: (N, d)."""
        start = [] if self.start is None else [self.start]
        rows = [(start + ids[:max_tokens])[: self.max_length] for ids in self._encode(texts)]
        if not all(rows):
            raise UserError(
                f"Text {rows.index([])} has no tokens, hence no features: leave it out."
            )
        trunk, found = self.model.base_model, [torch.empty(0)] * len(rows)
        for chunk in batches(rows, lambda _: self.batch_size):
            ids, real = pad([rows[i] for i in chunk], self.device)
            hidden = trunk(ids, attention_mask=real, use_cache=False).last_hidden_state
            last = (
                hidden[torch.arange(len(chunk), device=hidden.device), real.sum(1) - 1]
                .float()
                .cpu()
            )
            for i, vector in zip(chunk, last, strict=True):
                found[i] = vector
        return torch.stack(found).numpy()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, nothing added."""
        if not texts:
            raise UserError("There are no texts to judge.")
        if self.collapse_spaces:
            texts = [re.sub(" +", " ", text) for text in texts]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(list(texts), **options)["input_ids"]
        known = self.model.get_input_embeddings().num_embeddings
        if max((max(row, default=0) for row in ids), default=0) >= known:
            raise UserError(
                f"{self.name}: its tokenizer has ids that its model does not know "
                f"({known} are known): the two do not belong together."
            )
        return ids


def _start_token(name: str, tokenizer: Any, bos: Bos) -> int | None:
    """Id to put before every text, if any."""
    token: int | None = tokenizer.bos_token_id
    if bos == "never":
        return None
    if bos == "always":
        if token is None:
            raise UserError(f"The judge {name} has no start token: use bos `auto` or `never`.")
        return token
    if bos != "auto":
        raise UserError(f"bos is {bos!r}: use auto, always or never.")
    plain, full = (tokenizer("a", add_special_tokens=a)["input_ids"] for a in (False, True))
    return token if full[:1] == [token] and plain[:1] != [token] else None


def _end_token(name: str, tokenizer: Any, end: str | int | None, known: int) -> int | None:
    """Id of the token that ends a text: the one asked for, or the tokenizer's; None if neither.

    A tokenizer may name one that its model has never heard of.
    """
    if end is None:
        usual: int | None = tokenizer.eos_token_id
        return usual if usual is not None and usual < known else None
    if isinstance(end, str) and not end.isdecimal():
        found: int | None = tokenizer.get_vocab().get(end)
    else:
        found = int(end)
    if found is None or not 0 <= found < known:
        raise UserError(
            f"The judge {name} has no token `{end}` to end a text with: use one of its tokens, or "
            f"an id of 0..{known - 1}."
        )
    return found


def _context(config: Any, tokenizer: Any) -> int | None:
    """Tokens that a model reads at most; None if nobody says."""
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    limit = tokenizer.model_max_length
    return limit if limit < 1 << 31 else None  # without a limit of its own it says 10^30


def _max_length(name: str, wanted: int | None, context: int | None) -> int | None:
    if wanted is None:
        return context
    if wanted < 2:
        raise UserError(f"The judge's max_length is {wanted}: use 2 or more.")
    if context is not None and wanted > context:
        raise UserError(
            f"The judge's max_length is {wanted}, but {name} reads {context} tokens: use less."
        )
    return wanted
