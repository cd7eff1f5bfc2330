"""Settings of a denoiser, its noise schedule, and the architectures known by name."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from didi_instruct.errors import UserError

Kind = Literal["mdlm", "duo", "ar"]
Order = Literal["random", "streams"]
NEVER = -1
"""Stands in `ModelConfig.lengths` for a length that is never drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Noise schedule alpha_t, the probability that a token is still clean at time t."""

    name: Literal["log-linear", "cosine"] = "log-linear"
    """Form of alpha_t."""
    eps: float = 1e-3
    """alpha_1, the share left unmasked at t = 1; reference checkpoints have 1e-3, 0 is exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a transformer and the process it was made for."""

    kind: Kind = "mdlm"
    """`mdlm`: masked diffusion; `duo`: uniform-state diffusion; `ar`: left to right."""
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    cond_dim: int = 128
    """Width of the time embedding."""
    vocab_size: int = 50258
    """Rows of the embedding; in `mdlm` and `ar` the last is extra (mask or start symbol)."""
    masks: int = 1
    """Number of masks of an `mdlm`, its last ids. In each step of sampling all masks of a text are
    the same one of them, drawn at random, so that tokens drawn at once share a code."""
    length: int = 1024
    """Window: the longest sequence."""
    dropout: float = 0.0
    """Dropout on the residual branches, as in the reference DiT."""
    time_conditioning: bool = False
    """Condition on time; otherwise the time embedder gets 0 and the modulation is constant."""
    learned_positions: bool = False
    """Add a learned vector per position. The reference DiT has rotary positions alone, which are
    relative, so fully masked text looks the same to it at every position; where texts begin at the
    first position, the first step of sampling then starts blind."""
    end_id: int | None = None
    """Token that ends a text and fills its window, where each text has a window of its own. The
    fill is never noise and never written: a masked model is given the length of a text, an AR model
    learns nothing after the end."""
    lengths: tuple[int, ...] = ()
    """With `end_id`: numbers of training texts with 0, 1, 2, ... tokens before their end, -1 for a
    length that is never drawn. A masked model draws the length of a text from them, then writes."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn: the network gives them probability 0. In a given text they stay
    visible and cost nothing, as the letters of proteins for unknown residues do."""
    order: Order = "random"
    """Order in which an `mdlm` reveals positions by default: at random, or in `streams`, apart from
    each other (`process.masking`)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Refuse impossible shapes."""
        for name in ("layers", "hidden", "heads", "cond_dim", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}: use 1 or more.")
        if self.vocab_size < 2:
            raise UserError(
                f"model.vocab_size is {self.vocab_size}: one token and the mask need 2 or more."
            )
        if not 1 <= self.masks < self.vocab_size:
            raise UserError(
                f"model.masks is {self.masks}: use 1 or more, and leave room for tokens in a "
                f"vocabulary of {self.vocab_size}."
            )
        if self.kind != "mdlm" and (self.masks > 1 or self.order != "random"):
            name = "masks" if self.masks > 1 else "order"
            raise UserError(
                f"model.{name} is {getattr(self, name)}, but `{self.kind}` has no masks."
            )
        self._check_end()
        self._check_banned()
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise UserError(
                f"model.hidden is {self.hidden} with {self.heads} heads: "
                "each head needs a whole, even width."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}: use 0 or more and less than 1.")
        if not 0 <= self.schedule.eps < 1:
            raise UserError(f"schedule.eps is {self.schedule.eps}: use 0 or more and less than 1.")
        if self.time_conditioning and self.schedule.eps == 0:
            raise UserError(
                "schedule.eps is 0, so the time embedding of t = 1 is infinite: "
                "use eps > 0 or time_conditioning=false."
            )

    def _check_end(self) -> None:
        if self.end_id is None:
            if self.lengths:
                raise UserError("model.lengths are given without model.end_id, which ends texts.")
            return
        if self.kind == "duo" or not 0 <= self.end_id < self.num_tokens:
            raise UserError(
                f"model.end_id is {self.end_id}: use a token's id, of a model that is not `duo`."
            )
        if self.kind == "ar" and self.lengths:
            raise UserError("model.lengths are given, but an `ar` model ends texts by itself.")
        if self.kind == "mdlm" and (
            len(self.lengths) != self.length + 1
            or min(self.lengths) < NEVER
            or not any(count > 0 for count in self.lengths[1:])
        ):
            raise UserError(
                f"model.lengths has to count the texts of 0 to {self.length} tokens, some of 1 or "
                "more."
            )

    def _check_banned(self) -> None:
        if not self.banned:
            return
        known = set(range(self.num_tokens))
        if self.kind == "duo" or not set(self.banned) < known:
            raise UserError(
                "model.banned lists ids of tokens, not all of them, of a model that is not `duo`."
            )
        if self.kind == "ar" and self.end_id in self.banned:
            raise UserError(
                f"model.banned has {self.end_id}, which is model.end_id: an `ar` model draws it."
            )

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Ids of probability 0: the banned ones and, of a masked model, the end of a text."""
        given = () if self.end_id is None or self.kind == "ar" else (self.end_id,)
        return tuple(sorted({*self.banned, *given}))

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is drawn: all that the model reads, unless said."""
        drawn = (n for n, count in enumerate(self.lengths) if count != NEVER)
        return max(drawn, default=self.length)

    @property
    def num_tokens(self) -> int:
        """V: tokens that can be generated."""
        return self.vocab_size if self.kind == "duo" else self.vocab_size - self.masks

    @property
    def mask_id(self) -> int | None:
        """The extra id: the (first) mask of `mdlm`, the start of `ar`; `duo` has none."""
        return None if self.kind == "duo" else self.vocab_size - self.masks

    @property
    def mask_symbol(self) -> int:
        """Id that marks positions to write; a model without a mask has none of its own to lend."""
        return self.vocab_size if self.mask_id is None else self.mask_id


ARCHITECTURES: dict[str, ModelConfig] = {
    "small": ModelConfig(),
    "medium": ModelConfig(layers=24, hidden=1024, heads=16),
    "stories": ModelConfig(
        layers=10,
        hidden=256,
        heads=4,
        cond_dim=32,
        vocab_size=4097,
        length=256,
        learned_positions=True,
        schedule=ScheduleConfig(eps=0.0),
    ),
}
"""Architectures by name, as `didi info --arch` and `model.arch` in a recipe accept them."""


def architecture(name: str, **changes: object) -> ModelConfig:
    """Return the architecture of that name with some fields replaced."""
    if name not in ARCHITECTURES:
        raise UserError(f"`{name}` is not an architecture. Known: {', '.join(ARCHITECTURES)}.")
    return replace(ARCHITECTURES[name], **changes)  # type: ignore[arg-type]


DATA_LENGTHS = "data"
"""Stands for the lengths of the run's training texts."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_lengths(text: str) -> range | list[int]:
    """Return the lengths that a range or a list names."""
    parts = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    found = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    several = len(parts) > 1 and any(part and part[2] for part in parts)
    if len(found) < len(parts) or several or not all(each and each[0] > 0 for each in found):
        raise UserError(
            f"lengths is {text!r}: give a range (100-500) or a list (100,200,300) of whole numbers "
            "from 1, the smaller end of a range first."
        )
    return found[0] if len(found) == 1 else [each[0] for each in found]


def law_of_lengths(text: str, longest: int) -> tuple[int, ...]:
    """Return `ModelConfig.lengths` uniform over `read_lengths`, for a window of `longest`."""
    lengths = read_lengths(text)
    # Not `max`, which goes through all of a range, however long.
    most = lengths[-1] if isinstance(lengths, range) else max(lengths)
    if most > longest:
        raise UserError(
            f"lengths is {text}, but the model reads at most {longest} tokens: use shorter ones."
        )
    wanted = set(lengths)
    return tuple(1 if length in wanted else NEVER for length in range(longest + 1))
