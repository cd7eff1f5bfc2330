"""Masked LMs of `transformers` from local folders: BERT, RoBERTa, ModernBERT, ESM-2, DPLM.

Nothing of a folder is run: weights are read by our own readers, also from pickles, and code is
refused. config.json may ask for any amount of memory, or name kernels to fetch. So such settings
are left out, and the network is built on the meta device and compared with the headers of the
weights before a number is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig, Order
from didi_instruct.config.parse import parse
from didi_instruct.data.tokenizer import Tokenizer, quiet
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, FORMAT, LoadedModel, read_object
from didi_instruct.models.foreign.places import weight_files
from didi_instruct.models.foreign.stores import Header, open_store
from didi_instruct.models.masked_network import Family, MaskedLM, SpecialIds, special_ids
from didi_instruct.models.tensor_files import first_few, shown, shown_value

_ROBERTA = Family(trunk="roberta", head=("lm_head",), counts_from_padding=True)

FAMILIES = {  # by `model_type`
    "bert": Family(trunk="bert", head=("cls",)),
    "camembert": _ROBERTA,
    "distilbert": Family(
        trunk="distilbert",
        head=("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
        blocks="transformer.layer",
    ),
    "esm": Family(
        trunk="esm",
        head=("lm_head",),
        unused=("contact_head",),
        counts_from_padding=True,
        embeds_apart=True,
    ),
    "modernbert": Family(trunk="model", head=("head", "decoder"), blocks="layers"),
    "mpnet": Family(trunk="mpnet", head=("lm_head",), counts_from_padding=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
_REMOTE = ("llada", "Dream")  # masked LMs that `transformers` does not have, by `model_type`

_SHAPE = {  # our name, and theirs
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "length": ("max_position_embeddings",),
}
OWN = "didi"
"""Key of a config.json for what a student has and transformers does not know."""
_LARGEST = 1 << 40
_FRAME = 2  # special tokens that usually surround a text

# Settings that fetch or run something, or that are decided here.
_NOT_THE_NETWORK = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "experts_implementation", "_experts_implementation",
    "quantization_config", "compression_config", "transformers_weights", "fusion_config",
    "kernel_config", "use_kernels", "distributed_config", "dtype", "torch_dtype",
    "chunk_size_feed_forward",
}  # fmt: skip

_DPLM = "model.net."  # before the names in checkpoints of DPLM's training
_EMBEDDING = re.compile(r"embeddings\.(word|tok)_embeddings\.weight$")
_LAYER = re.compile(r"\.(?:layer|layers)\.(\d{1,6})\.")
# Tensors of other tasks than predicting tokens, and tables: files have them or not.
_OTHER = re.compile(r"(^|\.)(pooler|seq_relationship|contact_head|position_ids|inv_freq)(\.|$)")

# Files of tokenizers without tokenizer.json, of which `transformers` makes one.
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True)
class FoundMaskedLM:
    """A folder with a masked LM, by its config.json."""

    path: Path
    model_type: str
    description: str
    config: ModelConfig  # `length` leaves room for two special tokens; the tokenizer may differ
    settings: dict[str, Any]  # config.json

    @property
    def layout(self) -> str:
        """The layout it is written back in."""
        return "esm" if self.model_type == "esm" else "masked-lm"


def recognise_masked_lm(folder: str | Path) -> FoundMaskedLM | None:
    """Recognise a masked LM of `transformers` by its config.json; None if the folder holds none."""
    folder = Path(folder)
    try:
        settings = read_object(folder / CONFIG)
    except UserError:
        return None
    classes, model_type = settings.get("architectures"), settings.get("model_type")
    classes = [n for n in (classes if isinstance(classes, list) else []) if isinstance(n, str)]
    ours = settings.get("format") == FORMAT or {"n_blocks", "cond_dim"} & settings.keys()
    decodes = settings.get("is_decoder") or settings.get("is_encoder_decoder")
    if not isinstance(model_type, str) or ours or decodes:
        return None
    named = any(name.endswith("ForMaskedLM") for name in classes)
    if not named and model_type not in (*FAMILIES, *_REMOTE):
        return None
    reasons = []
    if settings.get("auto_map"):
        reasons.append("it brings code of its own, which is never run")
    if model_type not in FAMILIES:
        reasons.append(f"its family `{shown(model_type)}` is not supported")
    if reasons:
        raise UserError(
            f"{folder} is a masked LM that cannot be loaded: {', and '.join(reasons)}. Use one of "
            f"{', '.join(FAMILIES)} in the layout of transformers."
        )
    config = _config(folder / CONFIG, FAMILIES[model_type], settings)
    description = (
        f"{shown(next(iter(classes), 'masked LM'))} of the family {model_type}: {config.layers} "
        f"layers, hidden {config.hidden}, {config.num_tokens} tokens"
    )
    return FoundMaskedLM(folder, model_type, description, config, settings)


def _config(path: Path, family: Family, settings: Mapping[str, Any]) -> ModelConfig:
    shape: dict[str, Any] = {n: _number(path, settings, *of) for n, of in _SHAPE.items()}
    positions = shape["length"]
    shape["length"] -= _FRAME
    if family.counts_from_padding and settings.get("position_embedding_type") != "rotary":
        padding = {"pad_token_id": 1, **settings}
        shape["length"] -= 1 + _number(path, padding, "pad_token_id", least=0)
    if shape["length"] < 1:
        raise UserError(
            f"{path}: `max_position_embeddings` is {positions}, which leaves no room for a text. "
            "Fetch it again."
        )
    shape["vocab_size"] += 1
    try:
        return ModelConfig(kind="mdlm", cond_dim=1, **shape)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _number(path: Path, settings: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """Return the whole number that config.json has under one of several names."""
    for name in names:
        value = settings.get(name)
        if type(value) is int and least <= value <= _LARGEST:
            return value
    raise UserError(
        f"{path}: `{names[0]}` is {shown_value(settings.get(names[0]))}, and has to be a whole "
        f"number of {least} or more. Fetch it again."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSettings:
    """Settings of a `ModelConfig` unknown to transformers, in its config.json under `didi`."""

    end_id: int | None = None
    lengths: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    order: Order = "random"

    @classmethod
    def of(cls, config: ModelConfig) -> "OwnSettings":
        """Those of a model."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})


def _with_own(found: FoundMaskedLM, config: ModelConfig) -> ModelConfig:
    """Add the settings that a student was written with, if it is one."""
    if OWN not in found.settings:
        return config
    path = found.path / CONFIG
    own = parse(OwnSettings, found.settings[OWN], where=str(path), prefix=f"{OWN}.")
    try:
        return replace(config, **asdict(own))
    except UserError as error:
        raise UserError(f"{path}: `{OWN}`: {error}") from error


# Weights


class WeightFiles:
    """Weights of a folder by the names that `transformers` knows; numbers are read on demand."""

    def __init__(self, folder: Path) -> None:
        self.stores = [open_store(path) for path in weight_files(folder)]
        dplm = any(name.startswith(_DPLM) for store in self.stores for name in store.headers)
        self._prefix = _DPLM if dplm else ""
        self.headers: dict[str, Header] = {
            name.removeprefix(self._prefix): header
            for store in self.stores
            for name, header in store.headers.items()
            if name.startswith(self._prefix)
        }

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read all weights, memory-mapped; `dtype` casts all but rotary frequencies."""
        weights = {}
        for store in self.stores:
            names = [name for name in store.headers if name.startswith(self._prefix)]
            for name, tensor in store.read(names):
                cast = tensor.is_floating_point() and not name.endswith("inv_freq")
                weights[name.removeprefix(self._prefix)] = tensor.to(dtype if cast else None)
        return weights


def open_weights(found: FoundMaskedLM) -> WeightFiles:
    """Open the weights of a folder; refuse a config.json that describes another network."""
    weights, config = WeightFiles(found.path), found.config
    headers = weights.headers
    embedding = next((h.shape for name, h in headers.items() if _EMBEDDING.search(name)), (0, 0))
    layers = 1 + max((int(m[1]) for n in headers if (m := _LAYER.search(n))), default=-1)
    says, has = (config.num_tokens, config.hidden, config.layers), (*embedding, layers)
    if says != has:
        raise UserError(
            f"{found.path / CONFIG} does not fit the weights beside it: vocab_size, hidden_size "
            f"and layers are {says}, and the weights have {has}. Fetch both again."
        )
    return weights


# Loading


def read_tokenizer(found: FoundMaskedLM) -> tuple[Tokenizer, SpecialIds, ModelConfig]:
    """Read tokenizer and special ids, and set the configuration's length to that left for a text.

    tokenizer.json and ESM's vocab.txt are read here, other forms by `transformers`.
    """
    folder = found.path
    if (folder / "tokenizer.json").is_file() or found.model_type == "esm":
        tokenizer = Tokenizer.load(folder)
    elif not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{folder} has no tokenizer: put the model's tokenizer.json there.")
    else:
        read = load_transformers().AutoTokenizer.from_pretrained
        problem = f"{folder} has no tokenizer that can be read"
        with explained(problem, "Put the model's tokenizer.json there."):
            loaded = read(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = Tokenizer.from_transformers(loaded, str(folder))
    if tokenizer.size > found.config.num_tokens:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the network "
            f"{found.config.num_tokens}: fetch both again."
        )
    ids = special_ids(folder, found.settings, found.config.num_tokens, tokenizer)
    length = found.config.length + _FRAME - len(ids.before) - len(ids.after)
    config = _with_own(found, replace(found.config, length=length))
    ends = None if config.end_id is None else tokenizer.ending(config.end_id)
    return ends or tokenizer.endless(), ids, config


def load_masked_lm(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """Read a folder as `transformers` writes it; the model is a `MaskedLM`.

    `dtype` casts the parameters; None keeps the type of the largest. What was assumed is in the
    provenance, under `foreign`.
    """
    found = recognise_masked_lm(folder)
    if found is None:
        raise UserError(
            f"{folder}: its config.json is not that of a masked LM of transformers. Give a folder "
            "with config.json, weights and tokenizer of a …ForMaskedLM."
        )
    library = load_transformers()
    weights, (tokenizer, ids, config) = open_weights(found), read_tokenizer(found)
    with silence():
        network = _network(library, found, weights, dtype)
    model = MaskedLM(network, config, ids, FAMILIES[found.model_type]).to(device).eval()
    notes = [f"{len(ids.banned)} ids are never written: special tokens and no text."]
    if untouched := sorted({name for store in weights.stores for name in store.untouched}):
        notes.append(f"Pickled objects, not run: {first_few(untouched)}.")
    origin = {"source": str(folder), "layout": found.layout, "weights": "only", "notes": notes}
    return LoadedModel(model, config, tokenizer, None, {"foreign": origin})


def new_esm(config: ModelConfig, tokenizer: Tokenizer) -> MaskedLM:
    """A network of the shape of ESM-2 and DPLM with random weights, in training mode.

    Rotary positions, the output layer tied to the embeddings, and `token_dropout`.
    """
    known, frame = tokenizer.vocabulary, _FRAME
    pad, mask = known["<pad>"], known["<mask>"]
    library = load_transformers()
    settings = library.EsmConfig(
        vocab_size=config.num_tokens,
        mask_token_id=mask,
        pad_token_id=pad,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.hidden,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=config.length + frame,
        layer_norm_eps=1e-5,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        token_dropout=True,
        tie_word_embeddings=True,
        architectures=["EsmForMaskedLM"],
    )
    build, settings = described(library, "esm", settings.to_dict())
    with silence():
        network = build(settings)
    before, after = tokenizer.frame("<mask>")
    ids = SpecialIds(mask, pad, tuple(before), tuple(after), config.banned)
    return MaskedLM(network, config, ids, FAMILIES["esm"])


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            'A masked LM needs transformers, which is not here: pip install "transformers>=5.0".'
        ) from error
    return transformers


def _network(
    library: Any, found: FoundMaskedLM, files: WeightFiles, dtype: torch.dtype | None
) -> nn.Module:
    """Build the network on the meta device, compare it with the headers, and read its weights."""
    problem = (
        f"{found.path / CONFIG}: transformers {library.__version__} cannot build the network "
        "that it describes",
        "Fetch it again, or mend that setting.",
    )
    with explained(*problem):
        build, config = described(library, found.model_type, found.settings)
        with torch.device("meta"):
            shapes = build(config)
    _check_tensors(found, shapes, files.headers)
    weights = files.read(dtype)
    with explained(*problem):
        largest = max((t for t in weights.values() if t.is_floating_point()), key=Tensor.numel)
        network: nn.Module
        network, report = build.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype or largest.dtype,
            output_loading_info=True,
            local_files_only=True,
        )
    _refuse_names(found, build.__name__, report["missing_keys"], report["unexpected_keys"])
    return network


def described(library: Any, model_type: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and settings of transformers for a config.json, without what it must not decide."""
    kind = library.CONFIG_MAPPING[model_type]
    build = library.MODEL_FOR_MASKED_LM_MAPPING[kind]
    config = kind.from_dict({n: v for n, v in settings.items() if n not in _NOT_THE_NETWORK})
    config._attn_implementation = "sdpa" if build._supports_sdpa else "eager"
    return build, config


def _check_tensors(found: FoundMaskedLM, network: nn.Module, headers: dict[str, Header]) -> None:
    """Refuse weights of other shapes or types than the network's.

    Names may be old ones, which `transformers` translates. So tensors are missed here only if
    there are not enough numbers for them, and memory could not be foreseen.
    """
    expected = {name: tuple(p.shape) for name, p in network.named_parameters()}
    there = [name for name in expected if name in headers]
    if wrong := [n for n in there if headers[n].shape != expected[n]]:
        shapes = first_few(wrong, lambda n: f"{n} {headers[n].shape} for {expected[n]}")
        raise UserError(
            f"{found.path}: tensors do not have the shapes that config.json says ({shapes}). "
            "Fetch both again."
        )
    if packed := [n for n in there if not headers[n].is_weight]:
        # What would unpack them was left out of the settings.
        types = first_few(packed, lambda n: f"{n} {headers[n].dtype}")
        raise UserError(
            f"{found.path}: tensors are not real numbers of 16 bits or more ({types}). Use the "
            "checkpoint that is not quantised."
        )
    missing = [name for name in expected if name not in headers]
    if sum(prod(expected[n]) for n in missing) > sum(prod(h.shape) for h in headers.values()):
        _refuse_names(found, type(network).__name__, missing)


def _refuse_names(
    found: FoundMaskedLM, network: str, missing: Iterable[str], unknown: Iterable[str] = ()
) -> None:
    """Refuse tensors that are not there, or not the network's; those of other tasks do no harm."""
    if lacks := sorted(name for name in missing if not _OTHER.search(name)):
        raise UserError(
            f"{found.path} lacks tensors of {network} ({first_few(lacks)}). A model without its "
            "output layer cannot write: use the checkpoint that was trained to predict masked "
            "tokens."
        )
    if more := sorted(name for name in unknown if not _OTHER.search(name)):
        raise UserError(
            f"{found.path} has tensors that {network} does not know ({first_few(more)})."
        )


@contextmanager
def explained(problem: str, remedy: str) -> Iterator[None]:
    """Turn any exception of `transformers` into a `UserError` of one line."""
    try:
        yield
    except Exception as error:  # files in any state fail in any way
        reason = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise UserError(f"{problem} ({reason}). {remedy}") from error


@contextmanager
def silence() -> Iterator[None]:
    """Keep the library's reports and progress bars off the terminal."""
    logging: Any = load_transformers().utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
