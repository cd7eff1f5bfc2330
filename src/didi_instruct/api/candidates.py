"""Models as they are known before their weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.manifest import TOKENIZER, Manifest, read_manifest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of which only the manifest and the tokenizer are read."""

    source: str
    manifest: Manifest
    tokenizer: Tokenizer | None

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        return self.manifest.model

    @property
    def tokenizer_hash(self) -> str | None:
        """What its tokens are; None where it does not say."""
        return self.tokenizer.hash if self.tokenizer else None


def candidates(sources: Sequence[str]) -> list[Candidate]:
    """Look at models, each once; refuse those whose numbers do not belong into one table."""
    found = []
    for source in dict.fromkeys(sources):
        manifest = read_manifest(Path(source))
        told = TOKENIZER[0] in manifest.files
        found.append(Candidate(source, manifest, Tokenizer.load(Path(source)) if told else None))
    for other in found[1:]:
        if other.tokenizer_hash != found[0].tokenizer_hash:
            raise UserError(
                f"{found[0].source} and {other.source} have different tokenizers: their numbers "
                "are per token and do not belong into one table. Evaluate them one by one."
            )
    return found
