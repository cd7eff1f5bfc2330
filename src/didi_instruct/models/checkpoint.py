"""A model in a folder: `model.safetensors`, `config.json`, its tokenizer, perhaps a discriminator.

config.json is written last and holds size and SHA-256 of the other files. A save that replaces an
older one keeps each file it replaces as `.NAME.previous` until the new config.json is in place, so
a process killed at any point leaves a folder that loads: as it was, or as it was meant to be.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.schema import parse
from didi_instruct.data import files
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models import tensor_files
from didi_instruct.models.discriminator import (
    HEAD,
    Discriminator,
    build_discriminator,
    flat_name,
)
from didi_instruct.models.dit import build_model
from didi_instruct.models.network import Network, NetworkRecord
from didi_instruct.models.quantised import Storage, StoredWeights, pack
from didi_instruct.models.tensor_files import Shapes, shown, shown_value

if TYPE_CHECKING:
    from didi_instruct.models.masked_lm_record import RecordedMaskedLM

CONFIG = "config.json"
MODEL = "model.safetensors"
DISCRIMINATOR = "discriminator.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
ADAPTER = "adapter_model.safetensors"
ADAPTER_FILES = {  # of a student and a discriminator; what peft has no place for is in the other
    prefix + name for prefix in ("", "discriminator/") for name in (ADAPTER, "other.safetensors")
}
FORMAT = "didi"
VERSION = 1
MAX_LENGTH = 1 << 20  # more than any model was trained on, and its rotary table still fits
_NEVER_DEFAULTED = ("kind", "layers", "hidden", "heads", "vocab_size", "length")  # in config.json

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Weights = nn.Module | Mapping[str, Tensor]  # a network, or its whole (gathered) state dict


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file, as a manifest lists them."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        return cls(path.stat().st_size, files.sha256_file(path))

    def damage(self, path: Path, *, verify: bool = True) -> str | None:
        """Return in words how a file differs from its record; `verify` compares checksums."""
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != self.bytes:
            change = "truncated" if size < self.bytes else "altered"
            return f"{path} is {change}: it has {size} bytes instead of {self.bytes}"
        if verify and (digest := files.sha256_file(path)) != self.sha256:
            return f"{path} was altered: its SHA-256 is {digest} instead of {self.sha256}"
        return None


@dataclass(frozen=True)
class Manifest:
    """Content of config.json."""

    model: ModelConfig
    files: dict[str, FileRecord]
    discriminator: ModelConfig | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    storage: Storage | None = None  # of the parameters in the files; None: as they are used
    network: NetworkRecord | None = None  # a masked LM of transformers; None: a network of ours
    discriminator_network: NetworkRecord | None = None  # the same of the discriminator's trunk
    base: str | None = None  # fingerprint of the model that these are adapters of

    def __post_init__(self) -> None:
        weights, allowed = MODEL, {MODEL, DISCRIMINATOR, *TOKENIZER}
        if self.base is not None:
            weights, allowed = ADAPTER, ADAPTER_FILES
        for name in self.files:
            if name not in allowed:
                raise UserError(f"`files` lists {shown_value(name)}, no file of a model folder.")
        if weights not in self.files:
            raise UserError(f"`files` does not list {weights}.")
        critics = {DISCRIMINATOR, f"discriminator/{ADAPTER}"}
        if (self.discriminator is None) != critics.isdisjoint(self.files):
            raise UserError("`discriminator` and `files` disagree about one.")
        if self.discriminator_network is not None and self.discriminator is None:
            raise UserError("`discriminator_network` describes a discriminator that is not there.")
        for group, config in (("model", self.model), ("discriminator", self.discriminator)):
            if config is not None and config.length > MAX_LENGTH:
                raise UserError(f"`{group}.length` is {config.length}: {MAX_LENGTH} at most.")

    def to_bytes(self) -> bytes:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        # What earlier versions of didi do not know is written where there is something to say.
        for name in ("storage", "network", "discriminator_network", "base"):
            if content[name] is None:
                del content[name]
        for name in ("network", "discriminator_network"):
            if name in content and not content[name]["shifted"]:
                del content[name]["shifted"]
        return (json.dumps(content, indent=2) + "\n").encode()


@dataclass
class LoadedModel:
    """Networks in evaluation mode, and what else a folder holds."""

    model: nn.Module
    config: ModelConfig
    tokenizer: Tokenizer | None = None
    discriminator: Discriminator | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


def save_model(
    folder: str | Path,
    model: Weights,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    discriminator: Weights | None = None,
    provenance: dict[str, Any] | None = None,
    discriminator_config: ModelConfig | None = None,
    storage: Storage | None = None,
    record: NetworkRecord | None = None,
    discriminator_record: NetworkRecord | None = None,
) -> Path:
    """Write a model and what belongs to it; a model already in the folder is replaced.

    `provenance` is JSON that says where the model comes from. `record` is `Network.record` of a
    model given as a state dict, `discriminator_record` that of a discriminator given as one, and
    `discriminator_config` its shape, where it is not the model's. `storage` keeps the parameters in
    a type of the file's own, from which `load_model` makes float32 again: bfloat16 takes half the
    room, int8 a quarter (`models/quantised.py`).
    """
    folder = Path(folder)
    _check_tokenizer(folder, config, tokenizer)
    if isinstance(model, nn.Module):
        network = cast("Network", getattr(model, "_orig_mod", model))
        record = network.record
    build = _builder(folder, record)
    tensors = {MODEL: _for_disk(folder / MODEL, model, build, config, storage)}
    trunk = None
    if discriminator is not None:
        trunk = discriminator_config or config
        if isinstance(discriminator, Discriminator):
            trunk, discriminator_record = discriminator.config, discriminator.record
        build = _builder_of_discriminator(folder, discriminator_record)
        tensors[DISCRIMINATOR] = _for_disk(
            folder / DISCRIMINATOR, discriminator, build, trunk, storage
        )
    provenance = json.loads(json.dumps(provenance or {}))  # what is not JSON fails here
    old = read_manifest(folder).files if (folder / CONFIG).exists() else {}

    with files.no_space_as_user_error(folder), ExitStack() as cleanup:
        folder.mkdir(parents=True, exist_ok=True)
        _finish_interrupted(folder, old)
        needed = sum(t.nbytes for part in tensors.values() for t in part.values())
        files.require_space(folder, needed)
        texts = {} if tokenizer is None else tokenizer.files()
        written: dict[str, files.AtomicFile] = {}
        records: dict[str, FileRecord] = {}
        for name in (*tensors, *sorted(texts)):
            file = written[name] = files.AtomicFile(folder / name)
            cleanup.callback(file.discard)
            if name in tensors:
                records[name] = FileRecord(*tensor_files.write_tensors(file.write, tensors[name]))
            else:
                file.write(texts[name])
                digest = hashlib.sha256(texts[name]).hexdigest()
                records[name] = FileRecord(len(texts[name]), digest)
        of_trunk = None if discriminator is None else discriminator_record
        manifest = Manifest(config, records, trunk, provenance, storage, record, of_trunk)
        for name in written:
            _keep_previous(folder / name)
        for file in written.values():
            file.commit()
        files.write_atomic(folder / CONFIG, manifest.to_bytes())
        for name in old.keys() - written.keys():
            (folder / name).unlink(missing_ok=True)
        _forget_previous(folder)
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
    paths = {}
    for name, record in manifest.files.items():
        paths[name] = _current(folder / name, record)
        if (damage := record.damage(paths[name], verify=verify)) is not None:
            raise UserError(f"{damage}. Fetch it again.")
    tokenizer = Tokenizer.from_files(paths) if TOKENIZER[0] in paths else None
    _check_tokenizer(folder, manifest.model, tokenizer)

    # Every header is checked before the first tensor is read.
    weights = StoredWeights(paths[MODEL], manifest.storage)
    build = _builder(folder, manifest.network)
    network = _on_meta(weights.path, weights.shapes, build, manifest.model)
    discriminator, trunk = None, manifest.discriminator
    if trunk is not None:
        critic, of_trunk = StoredWeights(paths[DISCRIMINATOR], manifest.storage), None
        if manifest.discriminator_network is not None:
            of_trunk = _recorded(folder, manifest.discriminator_network)
        build = _builder_of_discriminator(folder, manifest.discriminator_network)
        discriminator = _on_meta(critic.path, critic.shapes, build, trunk)
        _fill_discriminator(discriminator, critic, of_trunk, device, dtype)
    if manifest.network is None:
        _fill(network, weights, device, dtype)
    else:
        read = weights.read(device, dtype)
        recorded = _recorded(folder, manifest.network)
        network = recorded.load(manifest.model, read, device)
        ends = recorded.family.ends or manifest.model.end_id is not None
        if tokenizer is not None and not ends:
            tokenizer = tokenizer.endless()
    return LoadedModel(network, manifest.model, tokenizer, discriminator, manifest.provenance)


def read_manifest(folder: Path) -> Manifest:
    """Read config.json of a model folder; anything it does not know is refused."""
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
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise UserError(f"{path} was not written by didi: it does not say `format: {FORMAT}`.")
    version = content.pop("version", None)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise UserError(
            f"{path} has format version {shown_value(version)}, but this didi reads up to "
            f"{VERSION}: upgrade it."
        )
    try:
        for group, name in product(("model", "discriminator"), _NEVER_DEFAULTED):
            if isinstance(content.get(group), dict) and name not in content[group]:
                raise UserError(f"{path}: `{group}.{name}` is missing.")
        return parse(Manifest, content, where=str(path))
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply. Fetch it again.") from error
    except UserError as error:
        reason = shown(str(error).removesuffix("."), len(str(path)) + 400)
        raise UserError(
            f"{reason}. Fetch it again, or upgrade didi if a newer one wrote it."
        ) from None


def read_json(path: Path) -> Any:
    """Read a JSON file; `UserError` if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}. Fetch it again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file, or something else in it."""
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def is_ours(folder: Path) -> bool:
    """Tell whether a folder was written by didi, or is one of its unfinished runs."""
    try:
        if not (folder / CONFIG).exists():
            return (folder / "checkpoints").is_dir()
        return read_object(folder / CONFIG).get("format") == FORMAT
    except (OSError, UserError):
        return False


def _builder(folder: Path, record: NetworkRecord | None) -> Callable[[ModelConfig], nn.Module]:
    return build_model if record is None else _recorded(folder, record).build


def _builder_of_discriminator(
    folder: Path, record: NetworkRecord | None
) -> Callable[[ModelConfig], Discriminator]:
    if record is None:
        return build_discriminator
    return partial(build_discriminator, network=_recorded(folder, record).build_trunk)


def _recorded(folder: Path, record: NetworkRecord) -> "RecordedMaskedLM":
    from didi_instruct.models.masked_lm_record import RecordedMaskedLM  # it imports this module

    return RecordedMaskedLM(folder / CONFIG, record)


def _on_meta(
    path: Path, shapes: Shapes, build: Callable[[ModelConfig], AnyModule], config: ModelConfig
) -> AnyModule:
    """Build a network without memory, after checking that `shapes` are those of its tensors."""
    wanted = (
        f"`{config.kind}` with {config.layers} layers, hidden {config.hidden}, {config.heads} "
        f"heads, vocab_size {config.vocab_size}"
    )
    if config.layers > len(shapes):
        # Not worth building to name each tensor: nonsense in config.json could ask for millions.
        last = {f"blocks.{config.layers - 1}.norm1.weight": (-1,)}
        tensor_files.check_shapes(path, shapes, last, wanted)
    with torch.device("meta"):
        network = build(config)
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    tensor_files.check_shapes(path, shapes, expected, wanted)
    return network


def _for_disk(
    path: Path,
    weights: Weights,
    build: Callable[[ModelConfig], nn.Module],
    config: ModelConfig,
    storage: Storage | None,
) -> dict[str, Tensor]:
    """Return the tensors to write, after checking that `load_model` would accept them."""
    if isinstance(weights, nn.Module):
        weights = getattr(weights, "_orig_mod", weights).state_dict()
    tensors = {name: t.detach() for name, t in weights.items()}
    network = _on_meta(path, {n: tuple(t.shape) for n, t in tensors.items()}, build, config)
    return pack(tensors, [flat_name(name) for name, _ in network.named_parameters()], storage)


def _fill(
    network: nn.Module,
    weights: StoredWeights,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Give a network on the meta device the tensors of a file, without copying them."""
    buffers = [flat_name(name) for name, _ in network.named_buffers()]
    tensors = weights.read(device, dtype, keep=buffers)
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UserError(f"{weights.path}: {' '.join(str(error).split())}") from error
    network.eval()


def _fill_discriminator(
    discriminator: Discriminator,
    weights: StoredWeights,
    record: "RecordedMaskedLM | None",
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """`_fill` for a trunk of our own, or of the masked LM that a record describes."""
    if record is None:
        _fill(discriminator, weights, device, dtype)
        return
    head = discriminator.output_layer
    tensors = weights.read(device, dtype, keep=[f"{HEAD}{n}" for n, _ in head.named_buffers()])
    own = {n.removeprefix(HEAD): tensors.pop(n) for n in list(tensors) if n.startswith(HEAD)}
    head.load_state_dict(own, assign=True)
    discriminator.trunk = record.load_trunk(discriminator.config, tensors, device)
    discriminator.eval()


def _check_tokenizer(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.size > config.num_tokens:
        extra = {"mdlm": ": no room for the mask", "ar": ": no room for the start symbol"}
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the model vocab_size "
            f"{config.vocab_size}{extra.get(config.kind, '')}."
        )


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


def _current(path: Path, record: FileRecord) -> Path:
    """Return the file that config.json means: the previous one if a save was killed half-way."""
    kept = _previous(path)
    interrupted = kept.exists() and record.damage(path) and record.damage(kept) is None
    return kept if interrupted else path


def _finish_interrupted(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Undo a save that was killed, so that files and config.json agree again."""
    for name, record in records.items():
        path = folder / name
        if (current := _current(path, record)) != path:
            current.replace(path)
    _forget_previous(folder)
    files.remove_temporaries(folder)


def _forget_previous(folder: Path) -> None:
    for path in folder.glob(".*.previous"):
        path.unlink(missing_ok=True)
