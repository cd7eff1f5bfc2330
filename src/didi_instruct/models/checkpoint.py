"""A model in a folder: `model.safetensors`, `config.json`, its tokenizer, perhaps a discriminator.

config.json is written last and holds size and SHA-256 of the other files. A save that replaces an
older one keeps each file it replaces as `.NAME.previous` until the new config.json is in place, so
a process killed at any point leaves a folder that loads: as it was, or as it was meant to be.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.files import (
    AtomicFile,
    no_space_as_user_error,
    remove_temporaries,
    require_space,
    sha256_file,
    write_atomic,
)
from didi_instruct.errors import UserError
from didi_instruct.models.build import build_model
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.manifest import (
    CONFIG,
    DISCRIMINATOR,
    MODEL,
    TOKENIZER,
    FileRecord,
    Manifest,
    read_manifest,
)
from didi_instruct.models.quantised import Storage, pack, read_stored, stored_shapes
from didi_instruct.models.tensor_files import check_shapes, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from didi_instruct.data.tokenizer import Tokenizer

Network = TypeVar("Network", bound=nn.Module)
Weights = nn.Module | Mapping[str, Tensor]
"""A network, or its whole state dict (gathered first, if it is sharded)."""


@dataclass
class LoadedModel:
    """What a folder holds; the networks are in evaluation mode."""

    model: nn.Module
    config: ModelConfig
    tokenizer: "Tokenizer | None" = None
    discriminator: Discriminator | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


def save_model(
    folder: str | Path,
    model: Weights,
    config: ModelConfig,
    tokenizer: "Tokenizer | None" = None,
    discriminator: Weights | None = None,
    provenance: dict[str, Any] | None = None,
    discriminator_config: ModelConfig | None = None,
    storage: Storage | None = None,
) -> Path:
    """Write a model and what belongs to it; a model already in the folder is replaced.

    `provenance` is JSON that says where the model comes from. `discriminator_config` is the shape
    of a discriminator given as a state dict, where it is not the model's. `storage` keeps the
    parameters in a type of the file's own, from which `load_model` makes float32 again: bfloat16
    takes half the room, int8 a quarter (`models/quantised.py`).
    """
    folder = Path(folder)
    _check_tokenizer(folder, config, tokenizer)
    trunk = None
    tensors = {MODEL: _for_disk(folder / MODEL, model, build_model, config, storage)}
    if discriminator is not None:
        trunk = discriminator_config or config
        if isinstance(discriminator, Discriminator):
            trunk = discriminator.config
        tensors[DISCRIMINATOR] = _for_disk(
            folder / DISCRIMINATOR, discriminator, Discriminator, trunk, storage
        )
    provenance = json.loads(json.dumps(provenance or {}))  # what is not JSON fails here
    old = read_manifest(folder) if (folder / CONFIG).exists() else None
    with no_space_as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _finish_interrupted(folder, old)
        require_space(folder, sum(t.nbytes for part in tensors.values() for t in part.values()))
        save = _Save(folder)
        try:
            for name, part in tensors.items():
                save.add_tensors(name, part)
            if tokenizer is not None:
                save.add_tokenizer(tokenizer)
            save.commit(Manifest(config, save.records, trunk, provenance, storage), old)
        finally:
            save.discard()
    return folder


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> LoadedModel:
    """Read what `save_model` wrote, all of it or nothing.

    On the CPU the weights are memory-mapped: what is not used is not read. `dtype` casts the
    parameters; None keeps the file's type, and makes float32 of what has a `storage`. `verify`
    compares checksums, which reads files whole.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    paths = {name: _locate(folder, name, r, verify) for name, r in manifest.files.items()}
    trunk = manifest.discriminator
    if (trunk is not None) != (DISCRIMINATOR in paths):
        raise UserError(f"{folder / CONFIG}: `discriminator` and `files` disagree about one.")
    tokenizer = _load_tokenizer(folder, paths)
    _check_tokenizer(folder, manifest.model, tokenizer)

    # Every header is checked before the first tensor is read.
    storage = manifest.storage
    network = _empty(paths[MODEL], build_model, manifest.model, storage)
    discriminator = None
    if trunk is not None:
        discriminator = _empty(paths[DISCRIMINATOR], Discriminator, trunk, storage)
        _fill(discriminator, paths[DISCRIMINATOR], device, dtype, storage)
    _fill(network, paths[MODEL], device, dtype, storage)
    return LoadedModel(network, manifest.model, tokenizer, discriminator, manifest.provenance)


def _on_meta(build: "Callable[[ModelConfig], Network]", config: ModelConfig) -> "Network":
    with torch.device("meta"):
        return build(config)


def _empty(
    path: Path,
    build: "Callable[[ModelConfig], Network]",
    config: ModelConfig,
    storage: Storage | None,
) -> "Network":
    """Return the network without memory, after checking that the file has just its tensors."""
    found = stored_shapes(path, storage)
    if config.layers > len(found):
        # Not worth building to name each tensor: nonsense in config.json could ask for millions.
        check_shapes(path, found, {f"blocks.{config.layers - 1}.norm1.weight": ()}, _wanted(config))
    network = _on_meta(build, config)
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    check_shapes(path, found, expected, _wanted(config))
    return network


def _fill(
    network: nn.Module,
    path: Path,
    device: torch.device | str,
    dtype: torch.dtype | None,
    storage: Storage | None,
) -> None:
    """Give a network on the meta device the tensors of a file, without copying them."""
    buffers = [name for name, _ in network.named_buffers()]
    tensors = read_stored(path, storage, device, dtype, keep=buffers)
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    left = [n for n, t in (*network.named_parameters(), *network.named_buffers()) if t.is_meta]
    assert not left, left
    network.eval()


def _for_disk(
    path: Path,
    weights: Weights,
    build: "Callable[[ModelConfig], nn.Module]",
    config: ModelConfig,
    storage: Storage | None,
) -> dict[str, Tensor]:
    """Return the tensors to write, after checking that `load_model` would accept them."""
    if isinstance(weights, nn.Module):
        weights = getattr(weights, "_orig_mod", weights).state_dict()
    network = _on_meta(build, config)
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    check_shapes(path, {n: tuple(t.shape) for n, t in weights.items()}, expected, _wanted(config))
    tensors = {name: t.detach() for name, t in weights.items()}
    if storage is None:
        return tensors
    return pack(tensors, {name for name, _ in network.named_parameters()}, storage)


def _wanted(config: ModelConfig) -> str:
    return (
        f"`{config.kind}` with {config.layers} layers, hidden {config.hidden}, {config.heads} "
        f"heads, vocab_size {config.vocab_size}"
    )


def _check_tokenizer(folder: Path, config: ModelConfig, tokenizer: "Tokenizer | None") -> None:
    if tokenizer is not None and tokenizer.size > config.num_tokens:
        extra = {"mdlm": ": no room for the mask", "ar": ": no room for the start symbol"}
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the model vocab_size "
            f"{config.vocab_size}{extra.get(config.kind, '')}."
        )


def _load_tokenizer(folder: Path, paths: Mapping[str, Path]) -> "Tokenizer | None":
    from didi_instruct.data.tokenizer import Tokenizer

    files = {name: paths[name] for name in TOKENIZER if name in paths}
    if not files:
        return None
    if all(path == folder / name for name, path in files.items()):
        return Tokenizer.load(folder)
    with tempfile.TemporaryDirectory() as temporary:  # an interrupted save: the names are others
        for name, path in files.items():
            shutil.copyfile(path, Path(temporary, name))
        return Tokenizer.load(Path(temporary))


class _Save:
    """The files of one save: written under temporary names first, then put in place together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, AtomicFile] = {}
        self.records: dict[str, FileRecord] = {}

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.files[name] = AtomicFile(self.folder / name)
        self.records[name] = FileRecord(*write_tensors(self.files[name].write, tensors))

    def add_tokenizer(self, tokenizer: "Tokenizer") -> None:
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.save(Path(temporary))
            for name in TOKENIZER:
                if Path(temporary, name).exists():
                    data = Path(temporary, name).read_bytes()
                    self.files[name] = AtomicFile(self.folder / name)
                    self.files[name].write(data)
                    self.records[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())

    def commit(self, manifest: Manifest, old: Manifest | None) -> None:
        for name in self.files:
            _keep_previous(self.folder / name)
        for file in self.files.values():
            file.commit()
        write_atomic(self.folder / CONFIG, manifest.to_bytes())
        gone = set(old.files if old else ()) - set(manifest.files)
        for path in (*(self.folder / name for name in gone), *self.folder.glob(".*.previous")):
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        for file in self.files.values():
            file.discard()


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _keep_previous(path: Path) -> None:
    """Give a file a second name, under which it outlives being replaced."""
    if not path.exists():
        return
    try:
        os.link(path, _previous(path))
    except OSError:  # a file system without hard links
        path.replace(_previous(path))


def _finish_interrupted(folder: Path, old: Manifest | None) -> None:
    """Undo what a killed save left undone, so that files and config.json agree again."""
    for name, record in (old.files if old else {}).items():
        path = folder / name
        if _is_undone(path, record):
            _previous(path).replace(path)
    for path in folder.glob(".*.previous"):
        path.unlink()
    remove_temporaries(folder)


def _matches(path: Path, record: FileRecord) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == record.bytes
        and sha256_file(path) == record.sha256
    )


def _is_undone(path: Path, record: FileRecord) -> bool:
    """Whether a save was killed after it replaced this file and before it replaced config.json."""
    previous = _previous(path)
    return previous.exists() and not _matches(path, record) and _matches(previous, record)


def _locate(folder: Path, name: str, record: FileRecord, verify: bool) -> Path:
    """Return the file that config.json means, after comparing it with what config.json says."""
    path = folder / name
    if _is_undone(path, record):
        return _previous(path)
    if not path.is_file():
        raise UserError(f"{path} is missing ({CONFIG} lists it, {record.bytes} bytes).")
    size = path.stat().st_size
    if size != record.bytes:
        change = "truncated" if size < record.bytes else "altered"
        raise UserError(
            f"{path} is {change}: it has {size} bytes, but {CONFIG} says {record.bytes}."
        )
    if verify and (digest := sha256_file(path)) != record.sha256:
        raise UserError(
            f"{path} was altered: its SHA-256 is {digest}, but {CONFIG} says {record.sha256}."
        )
    return path
