"""config.json of a model folder: configuration, provenance, and what the other files must be."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.parse import nearest, parse
from didi_instruct.errors import UserError
from didi_instruct.models.quantised import STORAGES, Storage
from didi_instruct.models.tensor_files import shown, shown_value

CONFIG = "config.json"
FORMAT = "didi"
VERSION = 1

MODEL = "model.safetensors"
DISCRIMINATOR = "discriminator.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

LONGEST = 1 << 20
"""Tokens of a text: more than any model here was trained on, and a table that still fits."""

_KEYS = ("format", "version", "model", "discriminator", "storage", "provenance", "files")
_REQUIRED = ("kind", "layers", "hidden", "heads", "vocab_size", "length", "time_conditioning")


@dataclass(frozen=True)
class FileRecord:
    """What a file of the folder must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of config.json."""

    model: ModelConfig
    files: dict[str, FileRecord]
    discriminator: ModelConfig | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    storage: Storage | None = None
    """How the weights are kept; None: in the type in which they are used."""

    def to_bytes(self) -> bytes:
        """Encode it as JSON."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if self.storage is None:
            del content["storage"]
        return (json.dumps(content, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read config.json of a model folder, refusing what it does not understand."""
    path = folder / CONFIG
    if folder.is_file():
        raise UserError(f"{folder} is a file: give the folder of a model.")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    if not path.is_file():
        steps = sorted((folder / "checkpoints").glob("step-*"))
        hint = f" Training has not finished; its latest checkpoint is {steps[-1]}." if steps else ""
        raise UserError(f"{folder} is not a model folder: it has no {CONFIG}.{hint}")
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} was not written by didi: it does not say `format: {FORMAT}`.")
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: `version` is {shown_value(version)}, not a format version.")
    if version > VERSION:
        raise UserError(
            f"{path} has format version {shown_value(version)}, but this didi reads up to "
            f"{VERSION}: upgrade it."
        )
    for key in content:
        if key not in _KEYS:
            raise UserError(f"{path}: `{shown(key)}` is not a setting.{nearest(shown(key), _KEYS)}")
    other = content.get("discriminator")
    return Manifest(
        model=_model_config(path, content.get("model"), "model"),
        discriminator=None if other is None else _model_config(path, other, "discriminator"),
        provenance=_mapping(path, content.get("provenance", {}), "provenance"),
        files=_files(path, content.get("files")),
        storage=_storage(path, content.get("storage")),
    )


def read_json(path: Path) -> Any:
    """Read a JSON file that anyone may have written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Fetch it again.") from error


def is_ours(folder: Path) -> bool:
    """Whether a folder was written by didi, or is one of its runs."""
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (folder / "checkpoints").is_dir()  # a run that has not finished
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _mapping(path: Path, value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path}: `{name}` is {shown_value(value)}, not a group of settings.")
    return value


def _storage(path: Path, value: Any) -> Storage | None:
    if value is None:
        return None
    for known in STORAGES:
        if value == known:
            return known
    raise UserError(
        f"{path}: the weights are stored as {shown_value(value)}, but this didi reads "
        f"{', '.join(STORAGES)}: upgrade it."
    )


def _files(path: Path, value: Any) -> dict[str, FileRecord]:
    records = {}
    for name, record in _mapping(path, value, "files").items():
        if name not in (MODEL, DISCRIMINATOR, *TOKENIZER):
            raise UserError(
                f"{path}: `files` lists {shown_value(name)}, which is no file of a model folder."
            )
        record = _mapping(path, record, f"files.{name}")
        size, digest = record.get("bytes"), record.get("sha256")
        if type(size) is not int or not isinstance(digest, str):
            raise UserError(f"{path}: `files.{name}` needs `bytes` and `sha256`.")
        records[name] = FileRecord(size, digest)
    if MODEL not in records:
        raise UserError(f"{path}: `files` does not list {MODEL}.")
    return records


def _model_config(path: Path, value: Any, group: str) -> ModelConfig:
    settings = _mapping(path, value, group)
    missing = [name for name in _REQUIRED if name not in settings]
    if missing:
        raise UserError(f"{path}: `{group}.{missing[0]}` is missing.")
    config = parse(ModelConfig, settings, where=str(path), prefix=f"{group}.")
    if config.length > LONGEST:
        raise UserError(
            f"{path}: `{group}.length` is {shown_value(config.length)}, which no model has: "
            f"restore the file, or set what the model was trained with ({LONGEST} at most)."
        )
    return config
