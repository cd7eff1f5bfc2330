"""Masked LMs of `transformers` from local folders: BERT, RoBERTa, ModernBERT, ESM-2, DPLM.

Also LLaDA and Dream, which are causal LMs made bidirectional (`causal_lm.py`). Nothing of a folder
is run: weights are read by our own readers, also from pickles, and code is refused, or left alone
in those two families. `native.py` builds the networks.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct.config.model import ModelConfig, Order
from didi_instruct.config.schema import parse
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.causal_lm import CAUSAL, FOREIGN, written_ids
from didi_instruct.models.checkpoint import CONFIG, FORMAT, LoadedModel, read_object
from didi_instruct.models.foreign.settings import whole_number
from didi_instruct.models.masked_network import Family, MaskedLM, SpecialIds, special_ids
from didi_instruct.models.native import (
    WeightFiles,
    build_network,
    described,
    explained,
    load_transformers,
    silence,
)
from didi_instruct.models.tensor_files import first_few, shown

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
    **{name: foreign.family for name, foreign in FOREIGN.items()},
}
RECORDED = {**{n: f for n, f in FAMILIES.items() if n not in FOREIGN}, **CAUSAL}
"""Families by the `model_type` that `transformers` has for their networks."""
# Denoisers that `transformers` does not have, by `model_type`.
_REMOTE = ("sdar", "sdar_moe", "llada2_moe", "lladamoe", "Fast_dLLM_Qwen")

_SHAPE = {  # our name, and theirs
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "length": ("max_position_embeddings",),
}
OWN = "didi"
"""Key of a config.json for what a student has and transformers does not know."""
_FRAME = 2  # special tokens that usually surround a text

_EMBEDDING = re.compile(r"(embeddings\.(word|tok)_embeddings|embed_tokens)\.weight$")
_LAYER = re.compile(r"\.(?:layer|layers)\.(\d{1,6})\.")
# Files of tokenizers without tokenizer.json, of which `transformers` makes one.
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True)
class FoundMaskedLM:
    """A folder with a masked LM, by its config.json."""

    path: Path
    model_type: str
    description: str
    config: ModelConfig  # `length` leaves room for two special tokens; the tokenizer may differ
    settings: dict[str, Any]  # config.json, in the words of transformers

    @property
    def layout(self) -> str:
        """The layout it is written back in."""
        if self.model_type in FOREIGN:
            return FOREIGN[self.model_type].layout
        return "esm" if self.model_type == "esm" else "masked-lm"

    @property
    def family(self) -> Family:
        """The parts of its network."""
        return FAMILIES[self.model_type]


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
    if settings.get("auto_map") and model_type not in FOREIGN:
        reasons.append("it brings code of its own, which is never run")
    if model_type not in FAMILIES:
        reasons.append(f"its family `{shown(model_type)}` is not supported")
    if reasons:
        raise UserError(
            f"{folder} is a masked LM that cannot be loaded: {', and '.join(reasons)}. Use one of "
            f"{', '.join(FAMILIES)} in the layout of transformers."
        )
    if model_type in FOREIGN:
        settings = FOREIGN[model_type].settings(folder / CONFIG, settings)
    config = model_config(folder / CONFIG, FAMILIES[model_type], settings)
    description = (
        f"{shown(next(iter(classes), 'masked LM'))} of the family {model_type}: {config.layers} "
        f"layers, hidden {config.hidden}, {config.num_tokens} tokens"
    )
    return FoundMaskedLM(folder, model_type, description, config, settings)


def model_config(path: Path, family: Family, settings: Mapping[str, Any]) -> ModelConfig:
    """Our settings for a config.json in the words of `transformers`, with one id more for a mask.

    `length` leaves room for two special tokens, where the family frames its texts.
    """
    shape: dict[str, Any] = {n: whole_number(path, settings, *of) for n, of in _SHAPE.items()}
    positions = shape["length"]
    shape["length"] -= 0 if family.ends else _FRAME
    if family.counts_from_padding and settings.get("position_embedding_type") != "rotary":
        padding = {"pad_token_id": 1, **settings}
        shape["length"] -= 1 + whole_number(path, padding, "pad_token_id", least=0)
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


def open_weights(found: FoundMaskedLM) -> WeightFiles:
    """Open the weights of a folder; refuse a config.json that describes another network."""
    foreign, config = FOREIGN.get(found.model_type), found.config
    weights = WeightFiles(found.path, str if foreign is None else foreign.rename)
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
    folder, foreign = found.path, FOREIGN.get(found.model_type)
    if found.model_type == "esm":
        tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = tokenizer_of(folder, foreign.tokenizer if foreign else "AutoTokenizer")
    if tokenizer.size > found.config.num_tokens:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids and the network "
            f"{found.config.num_tokens}: fetch both again."
        )
    size = found.config.num_tokens
    if foreign is not None:
        ids = written_ids(folder, found.settings, size, tokenizer, foreign)
        return tokenizer, ids, found.config
    ids = special_ids(folder, found.settings, size, tokenizer)
    length = found.config.length + _FRAME - len(ids.before) - len(ids.after)
    config = _with_own(found, replace(found.config, length=length))
    ends = None if config.end_id is None else tokenizer.ending(config.end_id)
    return ends or tokenizer.endless(), ids, config


def tokenizer_of(folder: Path, reader: str = "AutoTokenizer") -> Tokenizer:
    """Read a tokenizer; `reader` is the class of `transformers` where it is no tokenizer.json."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{folder} has no tokenizer: put the model's tokenizer.json there.")
    read = getattr(load_transformers(), reader).from_pretrained
    problem = f"{folder} has no tokenizer that can be read"
    with explained(problem, "Put the model's tokenizer.json there."), silence():
        loaded = read(folder, local_files_only=True, trust_remote_code=False)
    return Tokenizer.from_transformers(loaded, str(folder))


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
    weights, (tokenizer, ids, config) = open_weights(found), read_tokenizer(found)
    network = build_network(found.path, found.settings, weights, dtype)
    model = MaskedLM(network, config, ids, found.family).to(device).eval()
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
