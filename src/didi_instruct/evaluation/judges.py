"""Judges of tokens (the oracle language, models of ours), and `open_judge` for any judge.

A judge of texts reads them with its own tokenizer, so it can be asked about any sampler. A judge of
tokens scores sequences of its own tokens alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import config_values, digest
from didi_instruct.evaluation.causal_lm import CausalJudge, causal_nats, default_batch
from didi_instruct.evaluation.samples import SampleSet, constant_after_end, with_end
from didi_instruct.evaluation.scores import (
    Ends,
    Judge,
    JudgeConfig,
    Progress,
    Scores,
    checked,
    display_name,
    temperature_setting,
)
from didi_instruct.hub.sources import ModelInfo, find_shipped
from didi_instruct.models.checkpoint import MODEL, LoadedModel, is_ours, load_model, read_manifest
from didi_instruct.process.masking import before_end
from didi_instruct.training.distributed import pick_device
from didi_instruct.training.likelihood import nats_of_texts
from didi_instruct.training.objectives import make_objective

__all__ = [
    "ARJudge",
    "CausalJudge",
    "DiffusionJudge",
    "Judge",
    "JudgeConfig",
    "OracleJudge",
    "Scores",
    "open_judge",
]


def open_judge(
    source: str | Path, config: JudgeConfig | None = None, *, device: str | None = None
) -> Judge:
    """Open the judge that `source` names.

    `oracle`, a shipped name or a directory written by didi (left-to-right or diffusion), or
    whatever `CausalJudge` reads.
    """
    config, chosen, name = config or JudgeConfig(), pick_device(device), str(source)
    if name == "oracle":
        _refuse_settings(name, config, has_temperature=False)
        return OracleJudge(OracleLanguage.default().to(chosen))
    folder = find_shipped(source) or Path(source)
    if not is_ours(folder):
        return CausalJudge(source, config, device=chosen)
    manifest = read_manifest(folder)
    is_causal = manifest.model.kind == "ar"
    _refuse_settings(name, config, has_temperature=is_causal)
    loaded = load_model(folder, device=chosen)
    weights = digest(manifest.files[MODEL].sha256, config_values(loaded.config))
    kind = ARJudge if is_causal else DiffusionJudge
    return kind(loaded, config, name, weights, chosen)


def _refuse_settings(name: str, config: JudgeConfig, *, has_temperature: bool) -> None:
    """Refuse settings that a judge of tokens has no use for."""
    ours = JudgeConfig(
        batch_size=config.batch_size,
        temperature=config.temperature,
        draws=config.draws,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
    )
    if config != ours:
        raise UserError(
            "max_length, bos, collapse_spaces, end and beyond are for judges of texts; "
            f"{name} judges tokens."
        )
    if config.temperature != 1 and not has_temperature:
        raise UserError(f"The judge {name} has no logits to divide: leave its temperature at 1.")


@dataclass(frozen=True, slots=True)
class Windows:
    """The sequences of tokens that a judge reads."""

    judge: str
    tokenizer: str | None
    """Hash of its tokenizer."""
    num_tokens: int
    length: int

    @classmethod
    def of(cls, judge: str, loaded: LoadedModel) -> "Windows":
        """Windows of a model of ours."""
        tokenizer = loaded.tokenizer.hash if loaded.tokenizer else None
        return cls(judge, tokenizer, loaded.config.num_tokens, loaded.config.length)

    def check_tokenizer(self, model: str, theirs: str | None) -> None:
        """Refuse other tokens."""
        if None not in (theirs, self.tokenizer) and theirs != self.tokenizer:
            raise UserError(
                f"{model} and the judge {self.judge} have different tokenizers, and this judge "
                "reads tokens: use a causal language model as the judge."
            )

    def check_model(self, model: ModelInfo, end_id: int | None = None) -> None:
        """Refuse other tokens, and texts that end at another token than `end_id`."""
        self.check_tokenizer(model.source, model.tokenizer_hash)
        if model.config.end_id not in (None, end_id):
            raise UserError(
                f"{model.source} writes texts that end before their window, and the judge "
                f"{self.judge} knows the probability of whole windows: use a left-to-right judge, "
                "or one whose texts have windows of their own."
            )

    def check(self, samples: SampleSet) -> None:
        """Refuse samples that are not sequences of these tokens."""
        self.check_tokenizer(f"The samples of {samples.origin.model}", samples.origin.tokenizer)
        tokens = samples.tokens
        if tokens.shape[1] > self.length:
            raise UserError(
                f"The samples have {tokens.shape[1]} tokens, but the judge {self.judge} reads "
                f"{self.length}: draw shorter ones."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_tokens:
            raise UserError(
                f"A sample has a token outside 0..{self.num_tokens - 1}, which the judge "
                f"{self.judge} does not know."
            )

    def check_whole(self, samples: SampleSet) -> None:
        """Refuse texts that end before their window: only the window has a probability here."""
        self.check(samples)
        if bool((samples.lengths < samples.tokens.shape[1]).any()):
            raise UserError(
                f"The judge {self.judge} knows the probability of whole windows, but these texts "
                "end before: draw them without until_eot, or use a left-to-right judge, or one "
                "whose texts have windows of their own."
            )


def no_features(texts: Sequence[str]) -> NDArray[np.float32]:
    """Refuse: features are of texts."""
    raise UserError(
        "MAUVE compares features of a causal language model: give one as --judge, "
        "or leave out the metric mauve."
    )


class OracleJudge:
    """The oracle language's own log p."""

    name = "oracle"
    exact, bound, reads_texts = True, False, False
    ends: Ends = "included"
    features = staticmethod(no_features)

    def __init__(self, language: OracleLanguage, batch_size: int = 1024) -> None:
        self.language, self.batch_size, self.max_length = language, batch_size, language.length
        tables = (language.prior, language.initial, language.transition, language.emission)
        content = [table.cpu().numpy().tobytes() for table in tables]
        self.fingerprint = digest(language.words, language.sentences, *content)
        hash_ = language.tokenizer.hash
        self.windows = Windows(self.name, hash_, language.num_tokens, language.length)

    def check(self, model: ModelInfo) -> None:
        """Refuse a model of other tokens, or whose texts end before their window."""
        self.windows.check_model(model)

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score whole sequences, exactly; none ends before its window."""
        self.windows.check_whole(samples)
        count, length = samples.tokens.shape
        if length != self.max_length:
            raise UserError(f"The oracle's sequences have {self.max_length} tokens, not {length}.")
        parts = [torch.empty(0, dtype=torch.float64)]
        for first in range(0, count, self.batch_size):
            chunk = samples.tokens[first : first + self.batch_size].to(self.language.device)
            parts.append(-self.language.log_prob(chunk).cpu())
            if progress is not None:
                progress(first + len(chunk), count)
        return checked(self.name, Scores(torch.cat(parts), torch.full((count,), length)))


class DiffusionJudge:
    """A diffusion model's NELBO, an upper bound of -log p, estimated from `draws` noise levels.

    The noise follows the row. A model of windows scores whole windows. One whose texts have windows
    of their own scores texts that end as its own do; the cost of their length is always included.
    """

    exact, bound, reads_texts = False, True, False
    ends: Ends = "included"
    features = staticmethod(no_features)

    def __init__(
        self, loaded: LoadedModel, judge: JudgeConfig, name: str, weights: str, device: torch.device
    ) -> None:
        self.network, self.config, self.device = loaded.model, loaded.config, device
        self.max_length, self.draws, self.seed = loaded.config.length, judge.draws, judge.seed
        self.batch_size = judge.batch_size or default_batch(device)
        self.name = f"{name} (upper bound)"
        self.fingerprint = digest(weights, judge.draws, judge.seed)
        self.windows = Windows.of(self.name, loaded)

    def check(self, model: ModelInfo) -> None:
        """Refuse a model of other tokens, or whose texts end otherwise."""
        self.windows.check_model(model, self.config.end_id)

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score whole windows, or texts with their ends."""
        end_id, objective = self.config.end_id, make_objective(self.config)
        if end_id is None:
            self.windows.check_whole(samples)
        else:
            self._check_texts(samples, end_id)
        count, tokens = len(samples), constant_after_end(samples.tokens, samples.lengths)
        nats, scored = nats_of_texts(
            lambda batch: objective.loss(self.network, batch),
            self.config,
            lambda start, number: tokens[start : start + number],
            sequences=count,
            draws=self.draws,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            progress=None if progress is None else (lambda done: progress(done, count)),
        )
        if end_id is not None:
            nats[scored == 0] = math.inf  # no text is empty
        return checked(self.name, Scores(nats, scored.long()))

    def _check_texts(self, samples: SampleSet, end_id: int) -> None:
        """Refuse texts that end elsewhere than at their first `end_id`."""
        self.windows.check(samples)
        own = before_end(samples.tokens, end_id).sum(1)
        if not torch.equal(own, samples.lengths):
            raise UserError(
                f"The judge {self.name} knows texts up to their first token {end_id}, and these "
                "end elsewhere: draw them with until_eot, from a model with that end-of-text."
            )


class ARJudge:
    """A left-to-right model of ours: the exact log p of the tokens of a text, and of its end."""

    exact, bound, reads_texts = True, False, False
    ends: Ends = "apart"
    features = staticmethod(no_features)

    def __init__(
        self, loaded: LoadedModel, judge: JudgeConfig, name: str, weights: str, device: torch.device
    ) -> None:
        self.network, self.config, self.device = loaded.model, loaded.config, device
        self.max_length, self.temperature = loaded.config.length, judge.temperature
        self.batch_size = judge.batch_size or default_batch(device)
        self.name = display_name(name, temperature_setting(judge.temperature))
        self.fingerprint = digest(weights, judge.temperature)
        self.windows = Windows.of(self.name, loaded)

    def check(self, model: ModelInfo) -> None:
        """Refuse a model of other tokens; an end is a token like others."""
        self.windows.check_tokenizer(model.source, model.tokenizer_hash)

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score each text from the start symbol on, with and without its end, in one pass."""
        self.windows.check(samples)
        lengths, ended = samples.lengths.clone(), with_end(samples.tokens, samples.lengths)
        start = self.config.vocab_size - 1
        pairs = zip(samples.tokens.tolist(), ended.tolist(), strict=True)
        nats = causal_nats(
            lambda ids, _: self.network(ids),
            [[start, *row[:length]] for row, length in pairs],
            num_tokens=self.config.num_tokens,
            temperature=self.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )
        without = torch.where(lengths < ended, nats.before, nats.total)
        return checked(self.name, Scores(without, lengths, ended=Scores(nats.total, ended)))
