"""Which networks a file holds, by the names of its tensors.

The core keys (docs/foreign.md) appear under many prefixes: `backbone.` on the hub and in Lightning
files, twice over in SDTT's, none in DiDi-Instruct's release, `student_ema.` and `discriminator.` in
its checkpoints. `torch.compile` and data parallelism leave marks of their own, which are taken off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.settings import Settings
from didi_instruct.models.foreign.stores import SHADOW, Store
from didi_instruct.models.tensor_files import first_few, shown, shown_value

Layout = Literal["mdlm-hub", "duo-hub", "sdtt-hub", "ar-hub", "didi-instruct", "lightning", "core"]
WeightSet = Literal["ema", "raw"]
Keys = dict[str, str]
"""From the core keys to names in the file, in the file's order."""

FIRST = "vocab_embed.embedding"
FREQUENCIES = "rotary_emb.inv_freq"
_HEAD = "output_layer.main."
_RAW = ("backbone.backbone.", "backbone.", "student.", "model.", "")
_AVERAGED = ("student_ema.",)
_CRITIC = "discriminator."

MAX_NETWORKS = 16
"""In one file: training states have a handful."""


@dataclass(frozen=True)
class Networks:
    """The networks of a file."""

    raw: Keys | None
    averaged: Keys | None
    prefix: str
    """Of the raw weights, or of the averaged ones where there are no others."""
    shadows: tuple[str, ...] = ()
    """Averages of the raw weights, as a list without names."""
    discriminator: Keys | None = None
    others: tuple[str, ...] = ()
    """Tensors that belong to none of them."""

    @property
    def sets(self) -> tuple[WeightSet, ...]:
        """Which of the two there are."""
        averaged: tuple[WeightSet, ...] = ("ema",) if self.averaged or self.shadows else ()
        return averaged if self.raw is None else (*averaged, "raw")

    def pick(self, weights: WeightSet, store: Store) -> Keys:
        """Return the weights asked for; where there are no averaged ones, the raw ones."""
        if weights == "ema" and self.averaged is not None:
            return self.averaged
        if self.raw is None:
            raise UserError(f"{store.path} holds only averaged weights: ask for `ema`.")
        if weights == "ema" and self.shadows:
            return _match_shadows(store, self.raw, self.shadows)
        return self.raw


def find_networks(store: Store) -> Networks:
    """Sort the tensors of a file by the network they belong to."""
    groups, others = _by_prefix(store.headers, store.path)
    heads = _critics(groups)
    denoisers = {p: keys for p, keys in groups.items() if p not in heads}
    raw = next((p for p in _RAW if p in denoisers), None)
    averaged = next((p for p in _AVERAGED if p in denoisers), None)
    if raw is None and averaged is None:
        if len(denoisers) != 1:
            raise _unknown(store, denoisers)
        raw = next(iter(denoisers))
    kept = {raw, averaged, *heads[:1]}
    left = [n for p, keys in groups.items() if p not in kept for n in keys.values()]
    return Networks(
        raw=None if raw is None else denoisers[raw],
        averaged=None if averaged is None else denoisers[averaged],
        prefix=raw if raw is not None else str(averaged),
        shadows=tuple(n for n in others if n.startswith(SHADOW)),
        discriminator=groups[heads[0]] if heads else None,
        others=tuple(n for n in (*left, *others) if not n.startswith(SHADOW)),
    )


def find_discriminator(store: Store) -> Keys:
    """Return the discriminator of a file; of several, the one that `find_networks` takes."""
    groups, _ = _by_prefix(store.headers, store.path)
    heads = _critics(groups)
    if not heads:
        raise UserError(f"{store.path} holds no discriminator: remove it, or fetch it again.")
    return groups[heads[0]]


def _critics(groups: dict[str, Keys]) -> list[str]:
    """Return the prefixes of discriminators: first the usual one, which no average has."""
    heads = [p for p, keys in groups.items() if any(k.startswith(_HEAD) for k in keys)]
    return sorted(heads, key=lambda p: (p != _CRITIC, p))


def only_masked(networks: Networks, settings: Settings) -> bool:
    """True if the layout (SDTT's, DiDi-Instruct's) has only models of masked diffusion."""
    return (
        networks.discriminator is not None
        or networks.prefix in ("backbone.backbone.", *_AVERAGED)
        or settings.is_nested
    )


def layout_of(store: Store, networks: Networks, settings: Settings, family: str) -> Layout:
    """Name the layout; `didi-instruct` has models of masked diffusion alone."""
    if family not in ("duo", "ar") and (
        networks.discriminator is not None
        or networks.prefix in _AVERAGED
        or settings.model_type == "didi-instruct"
    ):
        return "didi-instruct"
    if networks.prefix == "":
        return "core"
    if store.is_training:
        return "lightning"
    if family in ("duo", "ar"):
        return "duo-hub" if family == "duo" else "ar-hub"
    is_sdtt = networks.prefix == "backbone.backbone." or settings.is_nested
    return "sdtt-hub" if is_sdtt else "mdlm-hub"


def _by_prefix(names: Iterable[str], where: object) -> tuple[dict[str, Keys], list[str]]:
    """Give each tensor to the longest prefix that a network has."""
    cleaned = {name: clean(name) for name in names}
    if len(set(cleaned.values())) < len(cleaned):
        raise UserError(f"{where} holds a network twice, compiled and not: keep one of the two.")
    starts = sorted(
        (c.removesuffix(FIRST) for c in cleaned.values() if c.endswith(FIRST)),
        key=len,
        reverse=True,
    )
    if len(starts) > MAX_NETWORKS:
        raise UserError(
            f"{where} holds {len(starts)} networks ({_quoted(starts)}): keep one of them."
        )
    groups: dict[str, Keys] = {prefix: {} for prefix in starts}
    others = []
    for name, key in cleaned.items():
        prefix = next((p for p in starts if key.startswith(p)), None)
        if prefix is None or key.startswith(SHADOW):
            others.append(name)
        else:
            groups[prefix][key.removeprefix(prefix)] = name
    return groups, others


def clean(name: str) -> str:
    """Take off what `torch.compile` and data parallelism put before names."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _match_shadows(store: Store, raw: Keys, shadows: tuple[str, ...]) -> Keys:
    """Name the averaged weights: a list in the order of the network's parameters.

    The state dict has that order too, with a buffer in between; parameters of a learned noise
    schedule follow the network's. Shapes confirm it.
    """
    parameters = [key for key in raw if key != FREQUENCIES]
    noise = sum(clean(name).startswith("noise.") for name in store.headers)
    if len(shadows) - len(parameters) not in (0, noise):
        raise UserError(
            f"{store.path}: `ema.shadow_params` has {len(shadows)} tensors for "
            f"{len(parameters)} parameters: ask for the `raw` weights."
        )
    named = dict(raw)
    for key, shadow in zip(parameters, shadows, strict=False):
        found, wanted = store.headers[shadow].shape, store.headers[raw[key]].shape
        if found != wanted:
            raise UserError(
                f"{store.path}: {shadow} has shape {shown_value(found)}, but it stands for "
                f"{shown(key)} {shown_value(wanted)}: ask for the `raw` weights."
            )
        named[key] = shadow
    return named


def _unknown(store: Store, denoisers: dict[str, Keys]) -> UserError:
    if denoisers:
        return UserError(
            f"{store.path} holds several networks ({_quoted(list(denoisers))}): keep one of them."
        )
    blocked = next((n for n in store.blocked if clean(n).endswith(FIRST)), None)
    if blocked is not None:
        what = store.blocked[blocked]
        return UserError(f"{store.path}: {shown(blocked)} is {what}, which is not run.")
    first = first_few([clean(name) for name in store.headers]) or "no tensor"
    return UserError(f"{store.path} holds no network of the DiT family: it has {first}.")


def _quoted(prefixes: list[str]) -> str:
    return first_few(prefixes, lambda prefix: f"`{shown(prefix)}`")
