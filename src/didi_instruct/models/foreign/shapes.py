"""Derive our configuration from the shapes of a foreign network's tensors and its config.json."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from didi_instruct.config.model import ARCHITECTURES, ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import MAX_LENGTH
from didi_instruct.models.foreign.layouts import FIRST, FREQUENCIES
from didi_instruct.models.foreign.places import USUAL
from didi_instruct.models.foreign.settings import Settings
from didi_instruct.models.tensor_files import Shapes, shown_value

Family = Literal["mdlm", "sedd", "duo", "ar"]

HEAD_WIDTH = 64
LENGTH = 1024
DEEPEST = 1024
WIDEST = 1 << 20
"""More layers, and more numbers per token, than any model has."""

BERT = 30_522
"""Its vocabulary has a mask of its own, id 103; here the extra id is the last."""

_TIME = "sigma_map.mlp.0.weight"
_SEES_TIME = {"mdlm": False, "sedd": True, "duo": True, "ar": False}


@dataclass(frozen=True)
class Frame:
    """The part of a configuration that shapes show."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    cond_dim: int | None

    def __str__(self) -> str:
        """Describe it as the settings do, by its architecture's name if it has one."""
        known = [
            f"`{name}` "
            for name, c in ARCHITECTURES.items()
            if (c.layers, c.hidden, c.heads) == (self.layers, self.hidden, self.heads)
        ]
        return (
            f"{''.join(known)}({self.layers} × {self.hidden} × {self.heads}), "
            f"vocabulary {self.vocab_size}"
        )


def family_of(
    path: Path,
    shapes: Shapes,
    settings: Settings,
    asked: Family | None,
    is_masked: bool,
    notes: list[str],
) -> Family:
    """Tell what the network was trained as: its tensors alone cannot, but for AR models.

    In order: what the caller says, config.json, the name of the file or folder, masked diffusion
    (which needs no note if `is_masked`, because the layout has no other models).
    """
    causal = _TIME not in shapes
    if asked is not None:
        if (asked == "ar") != causal:
            raise UserError(f"{path} is {'' if causal else 'not '}a left-to-right model.")
        return asked
    if causal:
        return "ar"
    if settings.causal:
        raise UserError(
            f"{settings.path}: causal attention with a time embedding is not a model known here: "
            "our left-to-right model has none."
        )
    said = (settings.model_type or "").lower()
    if said == "uniform":
        raise UserError(f"{settings.path}: scores of uniform noise (SEDD) are not read here.")
    if said:
        return "duo" if "duo" in said else "sedd" if said in ("sedd", "absorb") else "mdlm"
    name = path.parent.name if path.name in USUAL else path.name
    guesses: tuple[Family, ...] = ("duo", "sedd")
    for family in guesses:
        if re.search(rf"(?<![a-z]){family}(?![a-z])", name.lower()):
            notes.append(f"Read as `{family}` because of its name.")
            return family
    if not is_masked:
        notes.append(
            "Nothing in it tells masked from uniform-state diffusion: read as `mdlm` "
            '(family="duo" or "sedd" would change that).'
        )
    return "mdlm"


def frame_of(path: Path, shapes: Shapes, settings: Settings, notes: list[str]) -> Frame:
    """Read the frame from the tensors, and refuse a config.json that says otherwise."""
    embedding = shapes[FIRST]
    if len(embedding) != 2 or 0 in embedding:
        raise UserError(
            f"{path}: {FIRST} has shape {shown_value(embedding)}, not (vocabulary, width)."
        )
    vocab_size, hidden = embedding
    layers = len({m[1] for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))})
    time = shapes.get(_TIME, ())
    if layers > DEEPEST or max((hidden, *time)) > WIDEST:
        raise UserError(
            f"{path} names {layers} layers of width {hidden}, which no model has ({DEEPEST} and "
            f"{WIDEST} at most): fetch it again."
        )
    heads = _heads(path, shapes, hidden, settings, notes)
    frame = Frame(layers, hidden, heads, vocab_size, time[0] if time else None)
    said = {
        "layers": settings.layers,
        "hidden": settings.hidden,
        "heads": settings.heads,
        "vocab_size": settings.vocab_size,
        "cond_dim": settings.cond_dim if frame.cond_dim is not None else None,
    }
    for name, value in said.items():
        if value not in (None, getattr(frame, name)):
            raise UserError(
                f"{settings.path} says {shown_value(value)} for the {name}, but the tensors have "
                f"{getattr(frame, name)} and look like {frame}: one of the two is another model's."
            )
    return frame


def _heads(path: Path, shapes: Shapes, hidden: int, settings: Settings, notes: list[str]) -> int:
    """Count the heads: each has two rotary frequencies per pair of dimensions."""
    frequencies = shapes.get(FREQUENCIES, ())
    if len(frequencies) == 1 and frequencies[0] and hidden % (2 * frequencies[0]) == 0:
        return hidden // (2 * frequencies[0])
    if settings.heads is not None:
        return settings.heads
    if hidden % HEAD_WIDTH:
        raise UserError(
            f"{path}: nothing tells its number of heads, and {hidden} is no multiple of "
            f"{HEAD_WIDTH}: put a config.json with `n_heads` beside it."
        )
    notes.append(f"Nothing tells its number of heads: taken to be {HEAD_WIDTH} wide.")
    return hidden // HEAD_WIDTH


def config_of(
    path: Path, frame: Frame, family: Family, settings: Settings, notes: list[str]
) -> ModelConfig:
    """Put together our configuration; what nothing tells is the layout's default, and noted."""
    if settings.length is not None and settings.length > MAX_LENGTH:
        raise UserError(f"{settings.path}: texts of {settings.length} tokens are not sensible.")
    if frame.vocab_size == BERT and family != "duo":
        raise UserError(
            f"{path} has BERT's vocabulary, whose mask is id 103: only models whose mask is the "
            "last id are read here."
        )
    time_conditioning = settings.time_conditioning
    if family == "ar":
        time_conditioning = False
    elif time_conditioning is None:
        time_conditioning = _SEES_TIME[family]
        notes.append(
            f"Nothing tells whether it sees the time: {'yes' if time_conditioning else 'no'}, as "
            f"usual for `{family}`."
        )
    if settings.length is None:
        notes.append(f"Nothing tells its longest text: taken to be {LENGTH} tokens.")
    if family == "sedd":
        notes.append(
            "SEDD's scores, normalised over the real tokens, are used as the law of the clean "
            "token, to which they are proportional."
        )
    try:
        config = ModelConfig(
            kind="mdlm" if family == "sedd" else family,
            length=LENGTH if settings.length is None else settings.length,
            dropout=settings.dropout or 0.0,
            time_conditioning=time_conditioning,
        )
        return framed(config, frame)
    except UserError as error:
        raise UserError(f"{path} cannot be a model: {error}") from error


def framed(config: ModelConfig, frame: Frame) -> ModelConfig:
    """Return a configuration with another frame: a discriminator may be smaller than its model."""
    return replace(
        config,
        layers=frame.layers,
        hidden=frame.hidden,
        heads=frame.heads,
        vocab_size=frame.vocab_size,
        cond_dim=config.cond_dim if frame.cond_dim is None else frame.cond_dim,
    )
