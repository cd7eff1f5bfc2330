"""Judging tokens: the oracle language, and models of ours."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.causal_nats import Nats, causal_nats
from didi_instruct.evaluation.samples import SampleSet, constant_after_end, with_end
from didi_instruct.evaluation.scores import (
    Progress,
    Scores,
    check_settings,
    checked,
    digest,
    told_apart,
)
from didi_instruct.process.masking import before_end
from didi_instruct.training.likelihood import nats_of_texts
from didi_instruct.training.objectives import Batch


class TokenJudge:
    """What judges of tokens have in common."""

    def __init__(
        self, name: str, fingerprint: str, tokenizer: str | None, num_tokens: int, length: int
    ) -> None:
        self.name, self.fingerprint, self.tokenizer = name, fingerprint, tokenizer
        self.num_tokens, self.length = num_tokens, length

    def check_tokenizer(self, model: str, theirs: str | None) -> None:
        """Refuse a model that writes other tokens, by the hash of its tokenizer."""
        if None not in (theirs, self.tokenizer) and theirs != self.tokenizer:
            raise UserError(
                f"{model} and the judge {self.name} have different tokenizers, and this judge "
                "reads tokens: use a causal language model as the judge."
            )

    def check_ends(self, model: str, end_id: int | None) -> None:
        """Refuse a model whose texts end at `end_id`: only whole windows have a probability."""
        if end_id is not None:
            raise UserError(
                f"{model} writes texts that end before their window, and the judge {self.name} "
                "knows the probability of whole windows: use a left-to-right judge, or one whose "
                "texts have windows of their own."
            )

    def _check(self, samples: SampleSet) -> None:
        """Refuse samples that are not sequences of this judge's tokens."""
        self.check_tokenizer(f"The samples of {samples.origin.model}", samples.origin.tokenizer)
        tokens = samples.tokens
        if tokens.shape[1] > self.length:
            raise UserError(
                f"The samples have {tokens.shape[1]} tokens, but the judge {self.name} reads "
                f"{self.length}: draw shorter ones."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_tokens:
            raise UserError(
                f"A sample has a token outside 0..{self.num_tokens - 1}, which the judge "
                f"{self.name} does not know."
            )

    def _check_whole(self, samples: SampleSet) -> None:
        """Refuse texts that end before their window: only the window has a probability here."""
        self._check(samples)
        if bool((samples.lengths < samples.tokens.shape[1]).any()):
            raise UserError(
                f"The judge {self.name} knows the probability of whole windows, but these texts "
                "end before: draw them without until_eot, or use a left-to-right judge, or one "
                "whose texts have windows of their own."
            )


class OracleJudge(TokenJudge):
    """The oracle language's own log p."""

    exact = True

    def __init__(self, language: OracleLanguage, batch_size: int = 1024) -> None:
        self.language, self.batch_size = language, batch_size
        tables = (language.prior, language.initial, language.transition, language.emission)
        content = [table.cpu().numpy().tobytes() for table in tables]
        fingerprint = digest(language.words, language.sentences, *content)
        hash_ = language.tokenizer.hash
        super().__init__("oracle", fingerprint, hash_, language.num_tokens, language.length)

    def score(
        self, samples: SampleSet, progress: Progress | None = None, *, ending: bool = False
    ) -> Scores:
        """Score whole sequences, exactly; none ends before its window."""
        self._check_whole(samples)
        count, length = samples.tokens.shape
        if length != self.length:
            raise UserError(f"The oracle's sequences have {self.length} tokens, not {length}.")
        parts = []
        for first in range(0, count, self.batch_size):
            chunk = samples.tokens[first : first + self.batch_size].to(self.language.device)
            parts.append(-self.language.log_prob(chunk).cpu())
            if progress is not None:
                progress(first + len(chunk), count)
        nats = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
        return checked(self.name, Scores(nats, torch.full((count,), length)))


class DiffusionJudge(TokenJudge):
    """A diffusion model's NELBO, an upper bound of -log p, estimated from `draws` noise levels.

    `loss` is the network's part of the objective, as for `likelihood`. The noise follows the row.
    A model of windows scores whole windows. One whose texts have windows of their own scores texts
    that end as its own do; what their length costs is always part of it.
    """

    exact = False

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        config: ModelConfig,
        *,
        name: str,
        fingerprint: str,
        tokenizer: str | None = None,
        draws: int = 8,
        batch_size: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        fingerprint, name = digest(fingerprint, draws, seed), f"{name} (upper bound)"
        super().__init__(name, fingerprint, tokenizer, config.num_tokens, config.length)
        self.loss, self.config, self.device = loss, config, device
        self.draws, self.batch_size, self.seed = draws, batch_size, seed

    def check_ends(self, model: str, end_id: int | None) -> None:
        """Refuse a model whose texts do not end as this one's do."""
        if end_id != self.config.end_id:
            super().check_ends(model, end_id)

    def score(
        self, samples: SampleSet, progress: Progress | None = None, *, ending: bool = False
    ) -> Scores:
        """Score whole windows, or texts with their ends."""
        if self.config.end_id is None:
            self._check_whole(samples)
        else:
            self._check_texts(samples, self.config.end_id)
        count, tokens = len(samples), constant_after_end(samples.tokens, samples.lengths)
        nats, scored = nats_of_texts(
            self.loss,
            self.config,
            lambda start, number: tokens[start : start + number],
            sequences=count,
            draws=self.draws,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            progress=None if progress is None else (lambda done: progress(done, count)),
        )
        if self.config.end_id is not None:
            nats[scored == 0] = math.inf  # no text is empty
        return checked(self.name, Scores(nats, scored.long()))

    def _check_texts(self, samples: SampleSet, end_id: int) -> None:
        """Refuse texts that end elsewhere than at their first `end_id`."""
        self._check(samples)
        own = before_end(samples.tokens, end_id).sum(1)
        if not torch.equal(own, samples.lengths):
            raise UserError(
                f"The judge {self.name} knows texts up to their first token {end_id}, and these "
                "end elsewhere: draw them with until_eot, from a model with that end-of-text."
            )


class ARJudge(TokenJudge):
    """A left-to-right model of ours: the exact log p of the tokens that count."""

    exact = True

    def __init__(
        self,
        network: nn.Module,
        config: ModelConfig,
        *,
        name: str,
        fingerprint: str,
        tokenizer: str | None = None,
        temperature: float = 1.0,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        check_settings(batch_size, temperature)
        fingerprint, name = digest(fingerprint, temperature), told_apart(name, temperature)
        super().__init__(name, fingerprint, tokenizer, config.num_tokens, config.length)
        self.network, self.config, self.device = network, config, torch.device(device)
        self.temperature, self.batch_size = temperature, batch_size

    def check_ends(self, model: str, end_id: int | None) -> None:
        """Refuse nothing: an end is a token like others."""

    def score(
        self, samples: SampleSet, progress: Progress | None = None, *, ending: bool = False
    ) -> Scores:
        """Score the tokens of each sample that count, from the start symbol on.

        With `ending`, the token that ends a text before its window as well.
        """
        if ending:
            return checked(self.name, self.score_both(samples, progress)[1])
        lengths = samples.lengths.clone()
        return checked(self.name, Scores(self._nats(samples, lengths, progress).total, lengths))

    def score_both(
        self, samples: SampleSet, progress: Progress | None = None
    ) -> tuple[Scores, Scores]:
        """Score what counts, and that with the ends, by reading them once."""
        lengths, ended = samples.lengths.clone(), with_end(samples.tokens, samples.lengths)
        nats = self._nats(samples, ended, progress)
        without = torch.where(lengths < ended, nats.before, nats.total)
        return Scores(without, lengths), Scores(nats.total, ended)

    def _nats(self, samples: SampleSet, lengths: Tensor, progress: Progress | None) -> Nats:
        """Of the first tokens of each sample, so many."""
        self._check(samples)
        start = self.config.vocab_size - 1
        pairs = zip(samples.tokens.tolist(), lengths.tolist(), strict=True)
        return causal_nats(
            lambda ids, _: self.network(ids),
            [[start, *row[:length]] for row, length in pairs],
            num_tokens=self.num_tokens,
            temperature=self.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )
