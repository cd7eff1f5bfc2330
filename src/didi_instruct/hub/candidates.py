"""Models as they are known before their weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub.open import Origin, find, refuse_causal
from didi_instruct.models.checkpoint import TOKENIZER, read_manifest
from didi_instruct.models.foreign.places import locate
from didi_instruct.models.foreign.reading import recognise
from didi_instruct.models.masked_lm import read_tokenizer, recognise_masked_lm


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of which only settings, headers and the tokenizer are read."""

    source: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    given: str | None = None
    """The tokenizer that it was given, since it brings none."""

    @property
    def ends(self) -> bool:
        """Whether each of its texts has a window of its own."""
        return self.config.end_id is not None

    @property
    def tokenizer_hash(self) -> str | None:
        """What its tokens are; None where it does not say."""
        return self.tokenizer.hash if self.tokenizer else None


def candidates(sources: Sequence[str], tokenizer: str | None = None) -> list[Candidate]:
    """Look at models, each once; refuse those whose numbers do not belong into one table.

    `tokenizer` is for those that bring none.
    """
    found = [_look(source, tokenizer) for source in dict.fromkeys(sources)]
    if found and tokenizer is not None and not any(model.given for model in found):
        raise UserError(f"{found[0].source} has its own tokenizer: leave out --tokenizer.")
    for other in found[1:]:
        if other.tokenizer_hash != found[0].tokenizer_hash:
            raise UserError(
                f"{found[0].source} and {other.source} have different tokenizers: their numbers "
                "are per token and do not belong into one table. Evaluate them one by one."
            )
    return found


def shared_tokenizer(models: Sequence[Candidate]) -> Tokenizer | None:
    """What reads text for models of one table, in whatever order they are named.

    Theirs are equal but for the end of a text, which some do not know: one that does, if any.
    """
    found = [model.tokenizer for model in models if model.tokenizer is not None]
    return next((one for one in found if one.eot_id is not None), found[0] if found else None)


def shared_ids(models: Sequence[Candidate]) -> int | None:
    """Ids that all of the models know; None without any model."""
    return min((model.config.num_tokens for model in models), default=None)


def _look(source: str, tokenizer: str | None) -> Candidate:
    origin = find(source)
    config, own = _KINDS[origin.form](origin)
    if own is not None or tokenizer is None:
        return Candidate(source, config, own)
    given = Tokenizer.load(tokenizer)
    if given.size > config.num_tokens:
        raise UserError(
            f"{source} has {config.num_tokens} tokens, and the tokenizer `{tokenizer}` "
            f"{given.size}: give the one that it was trained with."
        )
    return Candidate(source, config, given, tokenizer)


def _ours(origin: Origin) -> tuple[ModelConfig, Tokenizer | None]:
    manifest = read_manifest(origin.path)
    told = TOKENIZER[0] in manifest.files
    return manifest.model, Tokenizer.load(origin.path) if told else None


def _foreign(origin: Origin) -> tuple[ModelConfig, Tokenizer | None]:
    refuse_causal(origin)
    config, folder = recognise(origin.path).config, locate(origin.path).tokenizer_folder
    tokenizer = None if folder is None else Tokenizer.load(folder)
    fits = tokenizer is not None and tokenizer.size <= config.num_tokens
    return config, tokenizer if fits else None


def _masked_lm(origin: Origin) -> tuple[ModelConfig, Tokenizer | None]:
    found = recognise_masked_lm(origin.path)
    assert found is not None
    tokenizer, _, config = read_tokenizer(found)
    return config, tokenizer


_KINDS = {"didi": _ours, "foreign": _foreign, "masked-lm": _masked_lm}
