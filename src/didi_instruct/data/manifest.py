"""The manifest of a folder of prepared tokens: `manifest.json`, written last."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from didi_instruct.data.files import write_atomic
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import Argument, UserError

Split = Literal["train", "valid"]
Rows = Literal["stream", "document"]
Long = Literal["drop", "cut", "split"]
T = TypeVar("T")

MANIFEST_FILE = "manifest.json"
_FORMAT = "didi-tokens"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Contents of a row: a stretch of all documents joined, or one document and its end."""

    rows: Rows = "stream"
    long: Long = "drop"
    """What becomes of a document that does not fit a row of its own."""

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        for name, word, words in (("rows", self.rows, Rows), ("long", self.long, Long)):
            if word not in get_args(words):
                raise UserError(
                    "{} is `{}`: use {}.", Argument(name), word, " or ".join(get_args(words))
                )
        if self.rows == "stream" and self.long != "drop":
            raise UserError(
                "{} needs {}: in a stream every document fits.",
                Argument("long", self.long),
                Argument("rows", "document"),
            )

    @property
    def settings(self) -> dict[str, str]:
        """Settings that differ from the default; a stream has none, as in earlier versions."""
        given = {"rows": self.rows, "long": self.long}
        return {name: word for name, word in given.items() if word != getattr(Layout(), name)}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of packed rows."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Which tokenizer made the tokens; the tokenizer itself lies beside the manifest."""

    hash: str
    size: int
    eot_id: int
    source: str

    @property
    def dtype(self) -> str:
        """Smallest little-endian type that holds every id."""
        return "<u2" if self.size <= 1 << 16 else "<u4"

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str) -> "TokenizerInfo":
        """Describe a tokenizer, by its name alone where `source` is a path."""
        if tokenizer.eot_id is None:
            raise UserError(
                "Tokenizer `{}` has no end-of-text token that is known here: name the token that "
                "separates documents ({}).",
                source,
                Argument("eot"),
            )
        name = Path(source).resolve().name if Path(source).exists() else source
        return cls(tokenizer.hash, tokenizer.size, tokenizer.eot_id, name)


@dataclass(frozen=True, slots=True)
class SourceScan:
    """One file of the corpus and what it holds."""

    path: str
    """Relative to the corpus."""
    bytes: int | None
    """None, like the hash, for a dataset that is not a file."""
    sha256: str | None
    documents: int
    pieces: int
    characters: int


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The rows of one split."""

    documents: int
    tokens: int
    """All that lie in rows, padding included."""
    rows: int
    dropped_tokens: int
    """Tokens of the last row, which was incomplete."""
    shards: list[Shard]
    long_documents: int | None = None
    """Documents that did not fit a row and were left out, cut or split; None for a stream."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know about a folder of prepared tokens."""

    tokenizer: TokenizerInfo
    length: int
    splits: dict[str, SplitInfo]
    sources: list[SourceScan]
    settings: dict[str, Any]

    @property
    def layout(self) -> Layout:
        """Layout of the rows."""
        return Layout(**{k: v for k, v in self.settings.items() if k in ("rows", "long")})

    @property
    def fingerprint(self) -> str:
        """Hash of the rows and of how to read them, whatever files they were made of."""
        shards = {name: [s.sha256 for s in split.shards] for name, split in self.splits.items()}
        held = [self.tokenizer.hash, self.tokenizer.eot_id, self.length, self.layout.rows, shards]
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write manifest.json, which makes the folder a finished one."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        for split in content["splits"].values():
            if split["long_documents"] is None:
                del split["long_documents"]
        content["dtype"] = "uint16" if self.tokenizer.dtype == "<u2" else "uint32"
        write_json(folder / MANIFEST_FILE, content)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a finished folder's manifest."""
        path = folder / MANIFEST_FILE
        return read_json(path, _FORMAT, _VERSION, cls.parse)

    @classmethod
    def parse(cls, content: dict[str, Any]) -> "Manifest":
        """Read a description as `asdict` gives it."""
        return cls(
            tokenizer=TokenizerInfo(**content["tokenizer"]),
            length=int(content["length"]),
            splits={name: _parse_split(split) for name, split in content["splits"].items()},
            sources=[SourceScan(**source) for source in content["sources"]],
            settings=dict(content["settings"]),
        )


def is_prepared(folder: Path) -> bool:
    """Return True if `didi data prepare` wrote the folder."""
    return (folder / MANIFEST_FILE).is_file()


def _parse_split(content: dict[str, Any]) -> SplitInfo:
    return SplitInfo(**{**content, "shards": [Shard(**shard) for shard in content["shards"]]})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, kind: str, version: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read a JSON file that `didi` wrote, and say so where it is not one."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != kind:
            raise UserError(f"{path}: was not written by `didi data prepare`.")
        if content["version"] != version:
            raise UserError(
                f"{path}: has version {content['version']} of the format, but only {version} is "
                "known: prepare the data again."
            )
        return parse(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: is damaged ({error}): prepare the data again.") from error
