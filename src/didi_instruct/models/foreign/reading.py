"""Public checkpoints of the DiT family as our models: recognised by names and shapes, mapped in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.discriminator import Discriminator, build_discriminator, flat_name
from didi_instruct.models.dit import build_model
from didi_instruct.models.foreign.layouts import (
    FREQUENCIES,
    Keys,
    Layout,
    WeightSet,
    clean,
    find_discriminator,
    find_networks,
    layout_of,
    only_masked,
)
from didi_instruct.models.foreign.places import Place, locate
from didi_instruct.models.foreign.settings import Settings, read_settings
from didi_instruct.models.foreign.shapes import Family, config_of, family_of, frame_of, framed
from didi_instruct.models.foreign.special_ids import (
    KEY,
    close_padding,
    find_padding,
    start_with,
)
from didi_instruct.models.foreign.stores import Store, open_store
from didi_instruct.models.layers import ROTARY_BASE
from didi_instruct.models.tensor_files import check_shapes, first_few, shown

_BLOCK = "blocks.0."
_PARTS = 5
"""Of a core key's name, between dots, at most."""

GPT2_REMEDY = "give GPT-2's tokenizer, with which the public models were trained"


@dataclass(frozen=True)
class Found:
    """Description of a foreign checkpoint, from its headers alone."""

    path: Path
    layout: Layout
    description: str
    config: ModelConfig
    weights: tuple[WeightSet, ...]
    """Sets of weights that a training run's state holds; none for a file of one network."""
    has_discriminator: bool
    notes: tuple[str, ...]
    """What was assumed or left out."""


@dataclass(frozen=True)
class _Part:
    """One network: its shape, and where its tensors are."""

    store: Store
    keys: Keys
    config: ModelConfig
    build: Callable[[ModelConfig], nn.Module] = build_model


@dataclass(frozen=True)
class _Plan:
    found: Found
    place: Place
    settings: Settings
    model: _Part
    discriminator: _Part | None


def recognise(path: str | Path, weights: WeightSet = "ema", family: Family | None = None) -> Found:
    """Say what a file or folder holds; `UserError` if it is not known here.

    Only headers are read, and the few numbers that tell rotary positions apart.

    `family` says what the network was trained as, where nothing in the file does.
    """
    return _plan(Path(path), weights, family).found


def load_foreign(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: WeightSet = "ema",
    family: Family | None = None,
) -> LoadedModel:
    """Read a foreign checkpoint; on the CPU its tensors are memory-mapped.

    `weights` chooses between the averaged and the raw ones, where a file has both; one that has
    only raw ones gives those. `dtype` casts the parameters; None keeps the file's type. What was
    assumed is in the provenance, under `foreign`.
    """
    plan = _plan(Path(path), weights, family)
    found = plan.found
    notes = list(found.notes)
    network = _load(plan.model, device, dtype)
    critic = None if plan.discriminator is None else _load(plan.discriminator, device, dtype)
    assert critic is None or isinstance(critic, Discriminator)
    tokenizer = _tokenizer(plan, notes)
    provenance: dict[str, Any] = {}
    padding = find_padding(found.config, plan.settings.padding_id, tokenizer)
    if padding is not None:
        provenance[KEY] = close_padding(network, padding)
        notes.append(f"Id {padding} is padding: it is among the noise, and never drawn as text.")
    if isinstance(network, ARModel):
        _start(network, tokenizer, notes)
    provenance["foreign"] = {
        "source": str(path),
        "layout": found.layout,
        "weights": weights if weights in found.weights else next(iter(found.weights), "only"),
        "notes": notes,
    }
    return LoadedModel(network, found.config, tokenizer, critic, provenance)


def _plan(path: Path, weights: WeightSet, family: Family | None) -> _Plan:
    place = locate(path)
    settings = read_settings(place.config_folder)
    store = open_store(place.model)
    networks = find_networks(store)
    keys = networks.pick(weights, store)
    shapes = _shapes(store, keys)
    notes: list[str] = []
    masked = only_masked(networks, settings) or place.discriminator is not None
    family = family_of(path, shapes, settings, family, masked, notes)
    frame = frame_of(store.path, shapes, settings, notes)
    config = config_of(store.path, frame, family, settings, notes)
    layout = layout_of(store, networks, settings, family)
    model = _checked(_Part(store, keys, config), f"`{layout}`, {frame}")

    critic = None
    if place.discriminator is not None:
        beside = open_store(place.discriminator)
        critic = _critic(beside, find_discriminator(beside), config)
        layout = "didi-instruct" if config.kind == "mdlm" else layout
        known = set(critic.keys.values())
        _note_leftovers(beside, tuple(n for n in beside.headers if n not in known), notes)
    elif networks.discriminator is not None:
        critic = _critic(store, networks.discriminator, config)
    sets: tuple[WeightSet, ...] = networks.sets if store.is_training else ()
    if weights == "ema" and sets == ("raw",):
        notes.append("It has no averaged weights: the raw ones are used.")
    _note_leftovers(store, networks.others, notes)
    found = Found(
        path=path,
        layout=layout,
        description=f"{layout}: {family} {frame}" + (", with a discriminator" if critic else ""),
        config=config,
        weights=sets,
        has_discriminator=critic is not None,
        notes=tuple(notes),
    )
    return _Plan(found, place, settings, model, critic)


def _critic(store: Store, keys: Keys, config: ModelConfig) -> _Part:
    """Describe a discriminator: the model's settings, and a frame of its own."""
    frame = frame_of(store.path, _shapes(store, keys), Settings(), [])
    if frame.vocab_size != config.vocab_size:
        raise UserError(
            f"{store.path}: the discriminator's vocabulary is {frame.vocab_size}, and the model's "
            f"{config.vocab_size}: they do not belong together."
        )
    part = _Part(store, keys, framed(config, frame), build_discriminator)
    return _checked(part, f"a discriminator, {frame}")


def _checked(part: _Part, wanted: str) -> _Part:
    """Refuse a network whose tensors are not exactly those of our own, or not numbers."""
    store, path = part.store, part.store.path
    expected = _expected(part)
    _refuse_blocked(store, {key for key in expected if key not in part.keys})
    found = _shapes(store, part.keys)
    if FREQUENCIES not in found:
        del expected[FREQUENCIES]
    check_shapes(path, found, expected, wanted)
    for key, name in part.keys.items():
        if not store.headers[name].is_weight:
            raise UserError(f"{path}: {key} holds {store.headers[name].dtype}, not real numbers.")
    if FREQUENCIES in part.keys:
        _check_frequencies(part)
    return part


def _expected(part: _Part) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's tensors. All layers are alike, so one of them is built.

    How many there are is what names in a file say, which may be anything.
    """
    one = _Part(part.store, part.keys, replace(part.config, layers=1), part.build)
    expected: dict[str, tuple[int, ...]] = {}
    block: dict[str, tuple[int, ...]] = {}
    for name, tensor in _on_meta(one).state_dict().items():
        shapes = block if name.startswith(_BLOCK) else expected
        shapes[name] = tuple(tensor.shape)
    for layer in range(part.config.layers):
        for name, shape in block.items():
            expected[f"blocks.{layer}.{name.removeprefix(_BLOCK)}"] = shape
    return expected


def _refuse_blocked(store: Store, missing: set[str]) -> None:
    """Say why a tensor is missing: in its place is something that is not run."""
    for name, what in store.blocked.items() if missing else ():
        parts = clean(name).rsplit(".", _PARTS)[-_PARTS:]
        if any(".".join(parts[n:]) in missing for n in range(len(parts))):
            raise UserError(
                f"{store.path}: {shown(name)} is {what}, which is not run: save it as a tensor."
            )


def _check_frequencies(part: _Part) -> None:
    (_, found), *_ = part.store.read([part.keys[FREQUENCIES]])
    wanted = _frequencies(part.config)
    if not torch.allclose(found.float(), wanted, rtol=1e-2, atol=0.0):  # bfloat16's are rounded
        raise UserError(
            f"{part.store.path}: this network has other rotary frequencies than those of base "
            f"{ROTARY_BASE:,.0f}, which is not supported: use a model that was trained with base "
            f"{ROTARY_BASE:,.0f}."
        )


def _frequencies(config: ModelConfig) -> Tensor:
    width = config.hidden // config.heads
    return 1.0 / ROTARY_BASE ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _shapes(store: Store, keys: Keys) -> dict[str, tuple[int, ...]]:
    return {key: store.headers[name].shape for key, name in keys.items()}


def _on_meta(part: _Part) -> nn.Module:
    with torch.device("meta"):
        return part.build(part.config)


def _load(part: _Part, device: torch.device | str, dtype: torch.dtype | None) -> nn.Module:
    """Build a network around the tensors of a file, without copying them."""
    network = _on_meta(part)
    buffers = {flat_name(name) for name, _ in network.named_buffers()}
    keys = {name: key for key, name in part.keys.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in part.store.read(keys):
        tensors[keys[name]] = tensor.to(device, None if keys[name] in buffers else dtype)
    if FREQUENCIES not in tensors:
        tensors[FREQUENCIES] = _frequencies(part.config).to(device)
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UserError(f"{part.store.path}: {' '.join(str(error).split())}") from error
    return network.eval()


def _tokenizer(plan: _Plan, notes: list[str]) -> Tokenizer | None:
    folder, config = plan.place.tokenizer_folder, plan.found.config
    if folder is None:
        notes.append(f"It has no tokenizer: {GPT2_REMEDY}.")
        return None
    tokenizer = Tokenizer.load(folder)
    if tokenizer.size > config.num_tokens:
        notes.append(
            f"Its tokenizer has {tokenizer.size} ids and the model {config.num_tokens} tokens, so "
            f"it is left out: {GPT2_REMEDY}."
        )
        return None
    return tokenizer


def _start(network: ARModel, tokenizer: Tokenizer | None, notes: list[str]) -> None:
    """Begin texts as the family does: with end-of-text, which in GPT-2 is the last token."""
    token = network.config.vocab_size - 2
    if tokenizer is not None and tokenizer.eot_id is not None:
        token = tokenizer.eot_id
    start_with(network, token)
    notes.append(f"Texts begin with token {token} (end-of-text), the mask's id stands for it.")


def _note_leftovers(store: Store, others: tuple[str, ...], notes: list[str]) -> None:
    if others:
        notes.append(f"Left out: {first_few(others)}.")
    if store.untouched:
        notes.append(f"Pickled objects, not run: {first_few(store.untouched)}.")
