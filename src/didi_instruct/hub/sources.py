"""SOURCE, the one way to name a model: a shipped name, a path, or a Hugging Face id.

`find_source` resolves it once, to one of four forms: a folder that didi wrote, adapters that it
wrote, a masked LM of `transformers`, or another public checkpoint. Each can be looked at, loaded
and hashed.

Models that ship with the package are folders under `shipped/`, and what is there is what is
shipped: `shipped/stories/student` is `stories`, `shipped/stories/teacher` is `stories/teacher`.
Shipped names go before the disk; `./stories`, or a `Path`, is always the folder.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import get_args

import torch

from didi_instruct.adapters import files as adapters
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.schema import nearest
from didi_instruct.data.files import sha256_file
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError, first_line
from didi_instruct.models.causal_lm import is_causal
from didi_instruct.models.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER,
    LoadedModel,
    Manifest,
    is_ours,
    load_model,
    read_manifest,
)
from didi_instruct.models.foreign.hub import fetch
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.places import SUFFIXES, locate, weight_files
from didi_instruct.models.foreign.reading import load_foreign, recognise
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.masked_lm import (
    FoundMaskedLM,
    load_masked_lm,
    open_weights,
    read_tokenizer,
    recognise_masked_lm,
)
from didi_instruct.models.tensor_files import shown

DEFAULT = "stories"
"""The model meant where none is named."""
ALWAYS_SHIPPED = (DEFAULT, f"{DEFAULT}/teacher")
"""Models of every installation, never looked for on the hub."""
_MAX_PATH = 1000
"""Letters of a path that an error shows."""
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to load a model; `weights`, `family` and `tokenizer` are for public checkpoints."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    """Cast the parameters; None keeps the file's type."""
    weights: WeightSet = "ema"
    """Averaged or raw weights, where a file has both."""
    family: Family | None = None
    """Family of a network that does not say its own."""
    tokenizer: str | Path | None = None
    """For a checkpoint that brings none."""

    def __post_init__(self) -> None:
        if self.weights not in get_args(WeightSet):
            raise UserError(f"weights is `{self.weights}`: use `ema` (averaged) or `raw`.")
        families = get_args(Family)
        if self.family is not None and self.family not in families:
            hint = nearest(self.family, families)
            raise UserError(f"`{self.family}` is not a family of models.{hint}")

    def refuse_choices(self, name: str) -> None:
        """Refuse `weights` and `family` for a model that leaves no choice."""
        if self.weights != "ema":
            raise UserError(f"{name} holds one set of weights: leave out `weights`.")
        if self.family is not None:
            raise UserError(f"{name} says itself what it is: leave out `family`.")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Settings and tokenizer of a model whose weights are not read."""

    found: "Source"
    config: ModelConfig
    tokenizer: Tokenizer | None
    given: str | None = None
    """Source of the tokenizer, if it was given one because it brings none."""

    @property
    def source(self) -> str:
        """Name of the model, as it was written."""
        return self.found.name

    @property
    def ends(self) -> bool:
        """True if each of its texts has a window of its own."""
        return self.config.end_id is not None

    @property
    def tokenizer_hash(self) -> str | None:
        """Hash of its vocabulary; None without a tokenizer."""
        return self.tokenizer.hash if self.tokenizer else None


@dataclass(frozen=True, slots=True)
class DidiFolder:
    """A folder that didi wrote."""

    name: str
    path: Path

    def _manifest(self) -> Manifest:
        manifest = read_manifest(self.path)
        if manifest.base is not None:
            raise UserError(
                f"{self.path} holds adapters and no {adapters.SETTINGS}, which names their base. "
                "Fetch it again."
            )
        return manifest

    def peek(self, tokenizer: str | None = None) -> ModelInfo:
        manifest = self._manifest()
        own = Tokenizer.load(self.path) if TOKENIZER[0] in manifest.files else None
        return _info(self, manifest.model, own, tokenizer)

    def load(self, options: LoadOptions) -> LoadedModel:
        options.refuse_choices(self.name)
        self._manifest()
        loaded = load_model(self.path, options.device, options.dtype)
        return _with_tokenizer(self.name, loaded, options.tokenizer)

    def digests(self) -> dict[str, str]:
        """Return those that config.json lists; no file is read."""
        return {name: record.sha256 for name, record in self._manifest().files.items()}

    def fingerprint(self) -> str:
        return self.digests()[MODEL]


@dataclass(frozen=True, slots=True)
class PublicCheckpoint:
    """A folder or a file of weights of the DiT family, in a layout of others."""

    name: str
    path: Path
    hub: str | None = None
    """Its name on the hub, if it was found there."""

    def peek(self, tokenizer: str | None = None) -> ModelInfo:
        self.refuse_causal()
        config, folder = recognise(self.path).config, locate(self.path).tokenizer_folder
        own = None if folder is None else Tokenizer.load(folder)
        fits = own is not None and own.size <= config.num_tokens
        return _info(self, config, own if fits else None, tokenizer)

    def load(self, options: LoadOptions) -> LoadedModel:
        self.refuse_causal()
        loaded = load_foreign(
            self.path, options.device, options.dtype, options.weights, options.family
        )
        _record_origin(loaded, self.name, self.hub)
        return _with_tokenizer(self.name, loaded, options.tokenizer)

    def refuse_causal(self) -> None:
        """Refuse a causal LM where a denoiser is asked for."""
        if is_causal(self.path):
            raise UserError(
                f"{self.name} is a causal LM, which reads from left to right: use it as --judge, "
                f"or make a denoiser of it with `didi finetune finetune-text --model {self.name} "
                "--set bidirectional=true`."
            )

    def digests(self) -> dict[str, str]:
        if is_causal(self.path):
            return _sha256(_transformers_files(self.path))
        place = locate(self.path)
        files = [place.model, place.discriminator]
        files += [place.config_folder / CONFIG] if place.config_folder else []
        if folder := place.tokenizer_folder:
            files += [folder / name for name in (*TOKENIZER, "vocab.json", "merges.txt")]
        return _sha256(path for path in files if path is not None and path.is_file())

    def fingerprint(self) -> str:
        return _joint(self.digests())


@dataclass(frozen=True, slots=True)
class MaskedLMFolder:
    """A masked LM as `transformers` writes it; its config.json fits the weights beside it."""

    name: str
    path: Path
    found: FoundMaskedLM
    hub: str | None = None
    """Its name on the hub, if it was found there."""

    def peek(self, tokenizer: str | None = None) -> ModelInfo:
        own, _, config = read_tokenizer(self.found)
        return _info(self, config, own, tokenizer)

    def load(self, options: LoadOptions) -> LoadedModel:
        options.refuse_choices(self.name)
        loaded = load_masked_lm(self.path, options.device, options.dtype)
        _record_origin(loaded, self.name, self.hub)
        return _with_tokenizer(self.name, loaded, options.tokenizer)

    def digests(self) -> dict[str, str]:
        return _sha256(_transformers_files(self.path))

    def fingerprint(self) -> str:
        return _joint(self.digests())


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Adapters that didi wrote, of a model that is a SOURCE too."""

    name: str
    path: Path

    def peek(self, tokenizer: str | None = None) -> ModelInfo:
        base = find_source(adapters.base_of(self.path)).peek(tokenizer)
        return ModelInfo(self, read_manifest(self.path).model, base.tokenizer, base.given)

    def load(self, options: LoadOptions) -> LoadedModel:
        options.refuse_choices(self.name)
        base = find_source(adapters.base_of(self.path))
        return adapters.load_adapters(self.path, base.fingerprint(), lambda: base.load(options))

    def digests(self) -> dict[str, str]:
        return adapters.digests(self.path)

    def fingerprint(self) -> str:
        return _joint(self.digests())


Source = DidiFolder | PublicCheckpoint | MaskedLMFolder | AdapterFolder
"""A model that was found, in one of four forms."""


def find_source(source: str | Path | Source) -> Source:
    """Resolve a SOURCE, unless it is already, fetching it from the hub if that is where it is."""
    if isinstance(source, Source):
        return source
    name = str(source)
    if (folder := find_shipped(source)) is not None:
        return DidiFolder(name, folder)
    try:
        path = Path(source).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, no such user
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UserError(f"`{shown(name)}` is no path ({reason}): check it.") from error
    if exists:
        return _classify(name, path, None)
    name = shown(name, _MAX_PATH)
    if isinstance(source, Path) or name.startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        raise UserError(f"{name}: no such file or folder.")
    if name in ALWAYS_SHIPPED:
        raise UserError(
            f"`{name}` ships with didi, but is not in {root()}: install didi again, or give a "
            "folder or a Hugging Face id."
        )
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise UserError(
            f"`{name}` is no file or folder here, no model that ships with didi "
            f"({', '.join(shipped())}), and no Hugging Face id (owner/name or "
            "owner/name@revision): check the path."
        )
    try:
        path = fetch(match[1], match[2])
    except UserError as error:
        raise UserError(
            f"{name} is no file or folder here. As a Hugging Face id: {error}"
        ) from error
    return _classify(name, path, match[1])


def load_source(source: str | Path | Source, options: LoadOptions | None = None) -> LoadedModel:
    """Load the networks, tokenizer and provenance of any SOURCE."""
    options = options or LoadOptions()  # refuses words that mean nothing before anything is read
    return find_source(source).load(options)


def peek_models(sources: Sequence[str], tokenizer: str | None = None) -> list[ModelInfo]:
    """Look at models, each once; refuse those whose numbers do not belong in one table.

    `tokenizer` is for those that bring none.
    """
    found = [find_source(source).peek(tokenizer) for source in dict.fromkeys(sources)]
    if found and tokenizer is not None and not any(model.given for model in found):
        raise UserError(f"{found[0].source} has its own tokenizer: leave out --tokenizer.")
    for other in found[1:]:
        if other.tokenizer_hash != found[0].tokenizer_hash:
            raise UserError(
                f"{found[0].source} and {other.source} have different tokenizers: their numbers "
                "are per token and do not belong in one table. Evaluate them one by one."
            )
    return found


def shared_tokenizer(models: Sequence[ModelInfo]) -> Tokenizer | None:
    """Tokenizer that reads text for models of one table, in whatever order they are named.

    Theirs are equal but for the end of a text, which some do not know: one that does, if any.
    """
    found = [model.tokenizer for model in models if model.tokenizer is not None]
    return next((one for one in found if one.eot_id is not None), found[0] if found else None)


def shared_ids(models: Sequence[ModelInfo]) -> int | None:
    """Number of ids that all of the models know; None without any model."""
    return min((model.config.num_tokens for model in models), default=None)


# Models that ship with the package


def root() -> Path:
    """Folder of shipped models, which need not exist."""
    return Path(str(resources.files("didi_instruct") / "shipped"))


def shipped() -> dict[str, Path]:
    """Folder of each shipped model, by its name."""
    return {_name_of(folder): folder for folder in sorted(root().glob("*/*")) if is_ours(folder)}


def shipped_name(folder: Path) -> str | None:
    """Name that a model in this folder has or would have; None outside the package."""
    return _name_of(folder) if folder.parent.parent == root().resolve() else None


def find_shipped(source: str | Path) -> Path | None:
    """Folder of a shipped model; None where `source` is no such name.

    A model folder of that name in the working directory may be what is meant: that is refused.
    """
    folder = None if isinstance(source, Path) else shipped().get(source)
    if folder is not None and is_ours(Path(source)):
        raise UserError(
            f"`{source}` is a model that ships with didi, and a model folder here: write "
            f"./{source} for the folder, {folder} for the other."
        )
    return folder


def _name_of(folder: Path) -> str:
    name = folder.parent.name
    return name if folder.name == "student" else f"{name}/{folder.name}"


# What the forms share


def _classify(name: str, path: Path, hub: str | None) -> Source:
    folder = path if path.is_dir() else path.parent
    # Weights that belong to a folder are told by the folder what they are.
    if path.is_dir() and adapters.is_adapter(folder):
        return AdapterFolder(name, folder)
    if is_ours(folder) and (path.is_dir() or path.name == MODEL):
        return DidiFolder(name, folder)
    found = recognise_masked_lm(folder)
    if found and (path.is_dir() or path in weight_files(folder)):
        open_weights(found)
        return MaskedLMFolder(name, folder, found, hub)
    if path.is_dir() and not any(p.suffix in SUFFIXES for p in path.iterdir()):
        raise UserError(
            f"{name} holds no model: neither didi's {CONFIG} nor weights ({' '.join(SUFFIXES)}). "
            "Give the folder, or the file itself."
        )
    return PublicCheckpoint(name, path, hub)


def _record_origin(loaded: LoadedModel, name: str, hub: str | None) -> None:
    # A name on the hub means something elsewhere too; the cache's path does not.
    foreign = loaded.provenance.setdefault("foreign", {})
    foreign["source"] = name
    if hub is not None:
        foreign["hub"] = hub


def _with_tokenizer(name: str, loaded: LoadedModel, tokenizer: str | Path | None) -> LoadedModel:
    """Add the tokenizer that a checkpoint was trained with and does not bring."""
    if tokenizer is None:
        return loaded
    if loaded.tokenizer is not None:
        raise UserError(f"{name} has its own tokenizer: leave out `tokenizer`.")
    loaded.tokenizer = _fitting(name, loaded.config, tokenizer)
    foreign = loaded.provenance.get("foreign")
    if isinstance(foreign, dict):
        foreign["tokenizer"] = str(tokenizer)
        foreign["notes"] = [n for n in foreign.get("notes", ()) if "no tokenizer" not in n]
    return loaded


def _info(
    found: Source, config: ModelConfig, own: Tokenizer | None, given: str | None
) -> ModelInfo:
    if own is not None or given is None:
        return ModelInfo(found, config, own)
    return ModelInfo(found, config, _fitting(found.name, config, given), given)


def _fitting(name: str, config: ModelConfig, source: str | Path) -> Tokenizer:
    """Read a tokenizer that was given; refuse one with more ids than the model has."""
    tokenizer = Tokenizer.load(source)
    if tokenizer.size > config.num_tokens:
        raise UserError(
            f"{name} has {config.num_tokens} tokens, and the tokenizer `{source}` "
            f"{tokenizer.size}: give the one that it was trained with."
        )
    return tokenizer


def _transformers_files(folder: Path) -> list[Path]:
    """Weights, settings and tokenizer of a folder that `transformers` wrote."""
    others = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".txt") and p.is_file())
    return [*weight_files(folder), *others]


def _sha256(files: Iterable[Path]) -> dict[str, str]:
    try:
        return {path.name: sha256_file(path) for path in files}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from error


def _joint(digests: dict[str, str]) -> str:
    return sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
