"""Masked LMs of `transformers` from local folders: BERT, RoBERTa, ModernBERT, ESM-2, DPLM.

Nothing of a folder is run: weights are read by our own readers, also from pickles, and code is
refused. config.json may ask for any amount of memory, or name kernels to fetch. So such settings
are left out, and the network is built on the meta device and compared with the headers of the
weights before a number is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer, quiet
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, FORMAT, LoadedModel
from didi_instruct.models.foreign.folders import new_folder
from didi_instruct.models.foreign.places import SUFFIXES, USUAL
from didi_instruct.models.foreign.stores import Header, Store, open_store
from didi_instruct.models.masked_network import (
    Family,
    MaskedLM,
    SpecialIds,
    read_json,
    special_ids,
)
from didi_instruct.models.tensor_files import first_few, shown, shown_value

_ROBERTA = Family(trunk="roberta", head=("lm_head",), counts_from_padding=True)

FAMILIES = {
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
"""By `model_type`."""

_REMOTE = ("llada", "Dream")
"""Masked LMs that `transformers` does not have, by `model_type`."""

_SETTINGS = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}
"""Our name, and theirs."""

_MOST = 1 << 40
"""No number of a network is larger."""

_FRAME = 2
"""Special tokens that usually surround a text."""

_LEFT_OUT = {
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "experts_implementation", "_experts_implementation",
    "quantization_config", "compression_config", "transformers_weights", "fusion_config",
    "kernel_config", "use_kernels", "distributed_config", "dtype", "torch_dtype",
    "chunk_size_feed_forward",
}  # fmt: skip
"""Settings that fetch or run something, or that are decided here: none of them is the network's."""

_DIT = {"n_blocks", "cond_dim"}
"""Settings of the DiT family (`models/foreign`)."""

_PREFIX = "model.net."
"""Of the names in checkpoints that DPLM's training writes."""

_EMBEDDING = re.compile(r"embeddings\.(word|tok)_embeddings\.weight$")
_LAYER = re.compile(r"\.(?:layer|layers)\.(\d{1,6})\.")
_OTHER = re.compile(r"(^|\.)(pooler|seq_relationship|contact_head|position_ids|inv_freq)(\.|$)")
"""Tensors of other tasks than predicting tokens, and tables: files have them or not."""

_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers without tokenizer.json, of which `transformers` makes one."""


@dataclass(frozen=True)
class FoundMaskedLM:
    """A folder with a masked LM, by its config.json."""

    path: Path
    model_type: str
    layout: Literal["esm", "masked-lm"]
    description: str
    config: ModelConfig
    """`length` leaves room for two special tokens, which the tokenizer may correct."""
    family: Family
    settings: dict[str, Any]
    """config.json."""


def recognise_masked_lm(folder: str | Path) -> FoundMaskedLM | None:
    """Recognise a masked LM of `transformers` by its config.json; None if the folder holds none."""
    folder = Path(folder)
    try:
        settings = read_json(folder / CONFIG)
    except UserError:
        return None
    names = settings.get("architectures")
    classes = [n for n in (names if isinstance(names, list) else []) if isinstance(n, str)]
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or settings.get("format") == FORMAT or _DIT & set(settings):
        return None
    if settings.get("is_decoder") or settings.get("is_encoder_decoder"):
        return None
    known = model_type in (*FAMILIES, *_REMOTE)
    if not known and not any(name.endswith("ForMaskedLM") for name in classes):
        return None
    _refuse_unsupported(folder, model_type, settings)
    family = FAMILIES[model_type]
    shape: dict[str, Any] = {n: _number(folder, settings, *of) for n, of in _SETTINGS.items()}
    positions = shape.pop("positions")
    length = positions - _FRAME
    if family.counts_from_padding and settings.get("position_embedding_type") != "rotary":
        length -= 1 + _number(folder, {"pad_token_id": 1, **settings}, "pad_token_id", least=0)
    if length < 1:
        raise UserError(
            f"{folder / CONFIG}: `max_position_embeddings` is {positions}, which leaves no room "
            "for a text. Fetch it again."
        )
    shape["vocab_size"] += 1
    try:
        config = ModelConfig(kind="mdlm", cond_dim=1, length=length, **shape)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    what = shown(next(iter(classes), "masked LM"))
    return FoundMaskedLM(
        path=folder,
        model_type=model_type,
        layout="esm" if model_type == "esm" else "masked-lm",
        description=f"{what} of the family {model_type}: {config.layers} layers, hidden "
        f"{config.hidden}, {config.num_tokens} tokens",
        config=config,
        family=family,
        settings=settings,
    )


def _refuse_unsupported(folder: Path, model_type: str, settings: Mapping[str, Any]) -> None:
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


def _number(folder: Path, settings: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """Return the whole number that config.json has under one of some names."""
    for name in names:
        value = settings.get(name)
        if type(value) is int and least <= value <= _MOST:
            return value
    raise UserError(
        f"{folder / CONFIG}: `{names[0]}` is {shown_value(settings.get(names[0]))}, and has to be "
        f"a whole number of {least} or more. Fetch it again."
    )


def framed(found: FoundMaskedLM, tokenizer: Tokenizer) -> tuple[SpecialIds, ModelConfig]:
    """Return its special ids, and its configuration with the length that they leave to a text."""
    ids = special_ids(found.path, found.settings, found.config.num_tokens, tokenizer)
    length = found.config.length + _FRAME - len(ids.before) - len(ids.after)
    return ids, replace(found.config, length=length)


# Weights


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a folder; safetensors come first."""
    for name in USUAL:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            files = {Path(str(n)).name for n in shards.values()} if isinstance(shards, dict) else ()
            if not files:
                raise UserError(f"{index} does not list files of weights: fetch it again.")
            return [folder / file for file in sorted(files)]
    others = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(others) != 1:
        several = ", ".join(shown(path.name) for path in others[:3]) or "none"
        raise UserError(
            f"{folder} should hold {' or '.join(USUAL)}, or one other file of weights, but has "
            f"{several}: leave one there."
        )
    return others


def weight_stores(folder: Path) -> list[Store]:
    """Return the headers of all files of weights of a folder."""
    return [open_store(path) for path in weight_files(folder)]


def headers_of(stores: list[Store]) -> dict[str, Header]:
    """Return the headers of all weights by the names that `transformers` knows."""
    prefix = _prefix(stores)
    return {
        name.removeprefix(prefix): header
        for store in stores
        for name, header in store.headers.items()
        if name.startswith(prefix)
    }


def read_weights(stores: list[Store], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights, memory-mapped, by the names that `transformers` knows.

    `dtype` casts each as it is read, so that the file is never in memory as a whole. Tables of
    frequencies keep their type.
    """
    prefix = _prefix(stores)
    weights = {}
    for store in stores:
        for name, tensor in store.read(n for n in store.headers if n.startswith(prefix)):
            cast = tensor.is_floating_point() and not name.endswith("inv_freq")
            weights[name.removeprefix(prefix)] = tensor.to(dtype if cast else None)
    return weights


def _prefix(stores: list[Store]) -> str:
    return _PREFIX if any(n.startswith(_PREFIX) for store in stores for n in store.headers) else ""


def check_headers(found: FoundMaskedLM, stores: list[Store]) -> None:
    """Refuse a config.json that describes another network than the weights beside it."""
    headers, config = headers_of(stores), found.config
    embedding = next((h.shape for name, h in headers.items() if _EMBEDDING.search(name)), (0, 0))
    layers = 1 + max((int(m[1]) for n in headers if (m := _LAYER.search(n))), default=-1)
    says, has = (config.num_tokens, config.hidden, config.layers), (*embedding, layers)
    if says != has:
        raise UserError(
            f"{found.path / CONFIG} does not fit the weights beside it: vocab_size, hidden_size "
            f"and layers are {says}, and the weights have {has}. Fetch both again."
        )


# Loading and saving


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
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(
            'A masked LM needs transformers, which is not here: pip install "transformers>=5.0".'
        ) from error
    stores = weight_stores(found.path)
    check_headers(found, stores)
    tokenizer = _tokenizer(found)
    ids, config = framed(found, tokenizer)
    with _silence():
        network = _network(found, stores, dtype)
    model = MaskedLM(network, config, ids, found.family).to(device).eval()
    notes = [f"{len(ids.banned)} ids are never written: special tokens and no text."]
    untouched = sorted({name for store in stores for name in store.untouched})
    if untouched:
        notes.append(f"Pickled objects, not run: {first_few(untouched)}.")
    origin = {"source": str(folder), "layout": found.layout, "weights": "only", "notes": notes}
    return LoadedModel(model, config, tokenizer.endless(), None, {"foreign": origin})


def save_masked_lm(model: MaskedLM, tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write a folder that `load_masked_lm` and `transformers` read: new, or empty."""
    network: Any = model.network
    with new_folder(Path(folder)) as hidden, _silence():
        tokenizer.save(hidden)
        network.save_pretrained(hidden)
    return Path(folder)


def _tokenizer(found: FoundMaskedLM) -> Tokenizer:
    """Read tokenizer.json or ESM's vocab.txt, other forms through `transformers`."""
    import transformers

    folder = found.path
    if (folder / "tokenizer.json").is_file() or found.model_type == "esm":
        tokenizer = Tokenizer.load(folder)
    elif not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{folder} has no tokenizer: put the model's tokenizer.json there.")
    else:
        problem = f"{folder} has no tokenizer that can be read"
        with _explained(problem, "Put the model's tokenizer.json there."):
            loaded = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        tokenizer = Tokenizer.from_transformers(loaded, str(folder))
    if tokenizer.size > found.config.num_tokens:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the network "
            f"{found.config.num_tokens}: fetch both again."
        )
    return tokenizer


def _network(found: FoundMaskedLM, stores: list[Store], dtype: torch.dtype | None) -> nn.Module:
    """Build the network on the meta device, compare it with the headers, and read its weights."""
    import transformers

    library: Any = transformers
    network: nn.Module
    explained = (
        f"{found.path / CONFIG}: transformers {transformers.__version__} cannot build the network "
        "that it describes",
        "Fetch it again, or mend that setting.",
    )
    with _explained(*explained):
        kind = library.CONFIG_MAPPING[found.model_type]
        build = library.MODEL_FOR_MASKED_LM_MAPPING[kind]
        config = kind.from_dict(_harmless(found.settings))
        config._attn_implementation = "sdpa" if build._supports_sdpa else "eager"
        with torch.device("meta"):
            shapes = build(config)
    _check_shapes(found, shapes, headers_of(stores))
    weights = read_weights(stores, dtype)
    with _explained(*explained):
        largest = max((t for t in weights.values() if t.is_floating_point()), key=Tensor.numel)
        network, report = build.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype or largest.dtype,
            output_loading_info=True,
            local_files_only=True,
        )
    _refuse_missing(found, build.__name__, report["missing_keys"])
    if unknown := _of_this_task(report["unexpected_keys"]):
        raise UserError(
            f"{found.path} has tensors that {build.__name__} does not know ({first_few(unknown)})."
        )
    return network


def _harmless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, also those of parts, without what fetches or runs something."""
    return {
        name: _harmless(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in _LEFT_OUT
    }


def _check_shapes(found: FoundMaskedLM, network: nn.Module, headers: Mapping[str, Header]) -> None:
    """Refuse weights of other shapes or types than the network's.

    Names may be old ones, which `transformers` translates. So tensors are missed here only if
    there are not enough numbers for them, and memory could not be foreseen.
    """
    expected = {name: tuple(p.shape) for name, p in network.named_parameters()}
    wrong = [n for n, s in expected.items() if n in headers and headers[n].shape != s]
    if wrong:
        shapes = first_few(wrong, lambda n: f"{n} {headers[n].shape} for {expected[n]}")
        raise UserError(
            f"{found.path}: tensors do not have the shapes that config.json says ({shapes}). "
            "Fetch both again."
        )
    packed = [n for n in expected if n in headers and not headers[n].is_weight]
    if packed:  # what would unpack them was left out of the settings
        types = first_few(packed, lambda n: f"{n} {headers[n].dtype}")
        raise UserError(
            f"{found.path}: tensors are not real numbers of 16 bits or more ({types}). Use the "
            "checkpoint that is not quantised."
        )
    missing = [name for name in expected if name not in headers]
    if sum(prod(expected[n]) for n in missing) > sum(prod(h.shape) for h in headers.values()):
        _refuse_missing(found, type(network).__name__, missing)


def _refuse_missing(found: FoundMaskedLM, name: str, names: Iterable[str]) -> None:
    if missing := _of_this_task(names):
        raise UserError(
            f"{found.path} lacks tensors of {name} ({first_few(missing)}). A model without its "
            "output layer cannot write: use the checkpoint that was trained to predict masked "
            "tokens."
        )


def _of_this_task(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not _OTHER.search(name))


@contextmanager
def _explained(problem: str, remedy: str) -> Iterator[None]:
    """Make one line of what `transformers` says to files that nobody checked."""
    try:
        yield
    except Exception as error:  # files in any state fail in any way
        reason = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise UserError(f"{problem} ({reason}). {remedy}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the library's reports and bars off the terminal: what matters is checked here."""
    from transformers.utils import logging as library

    logging: Any = library
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
