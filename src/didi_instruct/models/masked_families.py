"""Masked LMs of `transformers` by what their config.json says; nothing is imported or run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.manifest import CONFIG, FORMAT
from didi_instruct.models.tensor_files import shown, shown_value

Layout = Literal["esm", "masked-lm"]
Frame = Literal["tokenizer", "start", "none"]
"""What surrounds a text: what its tokenizer adds, a start symbol alone, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the networks of one `model_type` are taken apart, and how they see a text."""

    base: str | None = None
    """The part without output layer; None: the network is used whole, logits for every position."""
    head: tuple[str, ...] = ()
    """The parts of the output layer, in order."""
    frame: Frame = "tokenizer"
    counts_from_padding: bool = False
    """Whether the first position has the number after the padding id, as in fairseq's models."""
    longest: int | None = None
    """Tokens it was trained with, where config.json names more."""
    shifted: bool = False
    """Whether the output at a position is about the next one, as in models that began as AR."""
    pairwise_mask: bool = False
    """Whether the attention mask is (B, 1, 1, L) and not (B, L)."""
    embedding: str | None = None
    """How the name of its table of tokens ends; None: the names of its tensors are not known."""

    @property
    def specials(self) -> int:
        """Positions that the frame takes."""
        return {"tokenizer": 2, "start": 1, "none": 0}[self.frame]


_WORDS = "embeddings.word_embeddings.weight"
_ROBERTA = Family(base="roberta", head=("lm_head",), counts_from_padding=True, embedding=_WORDS)

FAMILIES = {
    "bert": Family(base="bert", head=("cls",), embedding=_WORDS),
    "camembert": _ROBERTA,
    "distilbert": Family(embedding=_WORDS),
    "esm": Family(base="esm", head=("lm_head",), embedding=_WORDS),
    "modernbert": Family(
        base="model", head=("head", "decoder"), embedding="embeddings.tok_embeddings.weight"
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""By `model_type`. Others that are a `…ForMaskedLM` are used whole."""

REMOTE = {
    ("llada", "LLaDAModelLM"): Family(frame="none"),
    ("Dream", "DreamModel"): Family(frame="start", shifted=True, pairwise_mask=True, longest=2048),
}
"""Diffusion LMs that come with their own code, by `model_type` and class."""

_DIT = {"n_blocks", "cond_dim"}
"""Settings of the DiT family, which is read without its code (`models/foreign`)."""

_SHAPE = {
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "dim", "d_model"),
    "heads": ("num_attention_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings", "max_sequence_length", "n_positions"),
}
"""Our name, and theirs."""

_MOST = 1 << 40
"""No number of a network is larger."""


@dataclass(frozen=True)
class FoundMaskedLM:
    """What a folder holds, by its config.json."""

    path: Path
    model_type: str
    layout: Layout
    description: str
    config: ModelConfig
    """`length` takes two positions for the frame of a text, which the tokenizer may correct."""
    family: Family
    settings: dict[str, Any]
    """config.json."""
    needs_code: bool
    """Whether it brings code of its own, which runs only if asked to."""
    notes: tuple[str, ...]
    """What was assumed."""


def recognise_masked_lm(folder: str | Path) -> FoundMaskedLM | None:
    """Say what masked LM of `transformers` a folder holds; None if it holds none."""
    folder = Path(folder)
    settings = _read(folder / CONFIG)
    family = _family(settings)
    if family is None:
        return None
    model_type = str(settings["model_type"])
    shape = {name: _number(folder, settings, name) for name in _SHAPE}
    positions = shape["positions"]
    notes = []
    if family.longest is not None and positions > family.longest:
        notes.append(f"It has {positions} positions and was trained with {family.longest}.")
        positions = family.longest
    if counts_from_padding(family, settings):
        positions -= 1 + _padding(folder, settings)
    if positions <= family.specials:
        raise UserError(
            f"{folder / CONFIG}: `{_name(settings, 'positions')}` is {shape['positions']}, which "
            "leaves no room for a text. Fetch it again."
        )
    try:
        config = ModelConfig(
            kind="mdlm",
            layers=shape["layers"],
            hidden=shape["hidden"],
            heads=shape["heads"],
            cond_dim=1,
            vocab_size=shape["vocab_size"] + 1,
            length=positions - family.specials,
        )
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    what = next(iter(_classes(settings)), "masked LM")
    return FoundMaskedLM(
        path=folder,
        model_type=model_type,
        layout="esm" if model_type == "esm" else "masked-lm",
        description=f"{shown(what)} of the family {shown(model_type)}: {config.layers} layers, "
        f"hidden {config.hidden}, {config.num_tokens} tokens",
        config=config,
        family=family,
        settings=settings,
        needs_code=bool(settings.get("auto_map")),
        notes=tuple(notes),
    )


def counts_from_padding(family: Family, settings: dict[str, Any]) -> bool:
    """Whether positions are numbered from after the padding id; ESM-1 does that, ESM-2 rotates."""
    absolute = settings.get("model_type") == "esm" and (
        settings.get("position_embedding_type", "absolute") == "absolute"
    )
    return family.counts_from_padding or absolute


def _read(path: Path) -> dict[str, Any]:
    """Return a config.json; an empty one if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _family(settings: dict[str, Any]) -> Family | None:
    model_type, classes = settings.get("model_type"), _classes(settings)
    if not isinstance(model_type, str) or settings.get("format") == FORMAT or _DIT & set(settings):
        return None
    if settings.get("is_decoder") or settings.get("is_encoder_decoder"):
        return None
    for (known, name), family in REMOTE.items():
        if model_type == known:
            return family if name in classes else None
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    return Family() if any(name.endswith("ForMaskedLM") for name in classes) else None


def _classes(settings: dict[str, Any]) -> list[str]:
    """Return the names of its classes; what is no list of names names none."""
    names = settings.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _padding(folder: Path, settings: dict[str, Any]) -> int:
    value = settings.get("pad_token_id")
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise UserError(
            f"{folder / CONFIG}: `pad_token_id` is {shown_value(value)}, and positions are counted "
            "from it: use the id of the padding token."
        )
    return value


def name_of(found: FoundMaskedLM, name: str) -> str:
    """Return what config.json calls one of our settings."""
    return _name(found.settings, name)


def _name(settings: dict[str, Any], name: str) -> str:
    return next((theirs for theirs in _SHAPE[name] if settings.get(theirs)), _SHAPE[name][0])


def _number(folder: Path, settings: dict[str, Any], name: str) -> int:
    for theirs in _SHAPE[name]:
        value = settings.get(theirs)
        if type(value) is int and 0 < value <= _MOST:
            return value
    raise UserError(
        f"{folder / CONFIG} does not say `{_SHAPE[name][0]}`, a whole number: fetch it again."
    )
