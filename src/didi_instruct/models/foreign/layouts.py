"""Which networks a file holds, by the names of its tensors.

The contract's core keys appear under many prefixes: `backbone.` on the hub and in Lightning files,
twice over in SDTT's, none in DiDi-Instruct's release, `student_ema.` and `discriminator.` in its
checkpoints. `torch.compile` and data parallelism leave marks of their own, which are taken off.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.settings import Settings
from didi_instruct.models.foreign.stores import SHADOW, Store
from didi_instruct.models.tensors import LISTED, describe

Layout = Literal["mdlm-hub", "duo-hub", "sdtt-hub", "didi-instruct", "lightning", "core"]
WeightSet = Literal["ema", "raw"]
Keys = dict[str, str]
"""From the contract's core keys to names in the file, in the file's order."""

FIRST = "vocab_embed.embedding"
FREQUENCIES = "rotary_emb.inv_freq"
_HEAD = "output_layer.main."
_RAW = ("backbone.backbone.", "backbone.", "student.", "model.", "")
_AVERAGED = ("student_ema.",)


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
    heads = {p for p, keys in groups.items() if any(k.startswith(_HEAD) for k in keys)}
    critics = [groups[p] for p in sorted(heads)]
    denoisers = {p: keys for p, keys in groups.items() if p not in heads}
    raw = next((p for p in _RAW if p in denoisers), None)
    averaged = next((p for p in _AVERAGED if p in denoisers), None)
    if raw is None and averaged is None:
        if len(denoisers) != 1:
            raise _unknown(store, denoisers)
        raw = next(iter(denoisers))
    kept = {raw, averaged}
    left = [n for p, keys in denoisers.items() if p not in kept for n in keys.values()]
    return Networks(
        raw=None if raw is None else denoisers[raw],
        averaged=None if averaged is None else denoisers[averaged],
        prefix=raw if raw is not None else str(averaged),
        shadows=tuple(n for n in others if n.startswith(SHADOW)),
        discriminator=critics[0] if critics else None,
        others=tuple(n for n in (*left, *others) if not n.startswith(SHADOW)),
    )


def find_discriminator(store: Store) -> Keys:
    """Return the one discriminator of a file that should hold nothing else."""
    groups, _ = _by_prefix(store.headers, store.path)
    heads = [keys for keys in groups.values() if any(k.startswith(_HEAD) for k in keys)]
    if len(heads) != 1:
        raise UserError(f"{store.path} holds no discriminator: remove it, or fetch it again.")
    return heads[0]


def only_masked(networks: Networks, settings: Settings) -> bool:
    """Whether the layout (SDTT's, DiDi-Instruct's) has only models of masked diffusion."""
    return (
        networks.discriminator is not None
        or networks.prefix in ("backbone.backbone.", *_AVERAGED)
        or settings.is_nested
    )


def layout_of(store: Store, networks: Networks, settings: Settings, family: str) -> Layout:
    """Name the layout."""
    if (
        networks.discriminator is not None
        or networks.prefix in _AVERAGED
        or settings.model_type == "didi-instruct"
    ):
        return "didi-instruct"
    if networks.prefix == "":
        return "core"
    if store.is_training:
        return "lightning"
    if networks.prefix == "backbone.backbone." or settings.is_nested:
        return "sdtt-hub"
    return "duo-hub" if family == "duo" else "mdlm-hub"


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
                f"{store.path}: {shadow} has shape {found}, but it stands for {key} {wanted}: "
                "ask for the `raw` weights."
            )
        named[key] = shadow
    return named


def _unknown(store: Store, denoisers: dict[str, Keys]) -> UserError:
    if denoisers:
        prefixes = ", ".join(f"`{p}`" for p in list(denoisers)[:LISTED])
        return UserError(f"{store.path} holds several networks ({prefixes}): keep one of them.")
    blocked = next((n for n in store.blocked if clean(n).endswith(FIRST)), None)
    if blocked is not None:
        return UserError(f"{store.path}: {blocked} is {store.blocked[blocked]}, which is not run.")
    shapes = {clean(n): h.shape for n, h in store.headers.items()}
    first = ", ".join(re.sub(r"\s", " ", n[:60]) for n in list(shapes)[:LISTED]) or "no tensor"
    return UserError(
        f"{store.path} holds no network of the DiT family: it has {first} … and looks like "
        f"{describe(shapes)}."
    )
