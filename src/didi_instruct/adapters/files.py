"""Adapters in folders that peft reads too, with config.json of ours beside them.

`adapter_config.json` and `adapter_model.safetensors` are the student's, in a folder `discriminator`
the discriminator's; `other.safetensors` has what peft has no place for, the discriminator's head
and the codes of a mixture. The weights of the base are not copied: its SOURCE is in
adapter_config.json, which may be edited if that moves, and config.json has its fingerprint.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from didi_instruct.adapters.lora import (
    Adapted,
    AdapterRecord,
    Lora,
    layer_key,
    layer_path,
    layers,
    shell,
)
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import LoraConfig
from didi_instruct.data import files
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import (
    ADAPTER,
    CONFIG,
    FileRecord,
    LoadedModel,
    Manifest,
    is_ours,
    read_manifest,
    read_object,
)
from didi_instruct.models.discriminator import HEAD, Discriminator
from didi_instruct.models.foreign.settings import positive_number, whole_number
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.tensor_files import first_few, read_headers, read_tensors, save_tensors

SETTINGS, OTHER, CRITIC = "adapter_config.json", "other.safetensors", "discriminator"
BASE = "base_model_name_or_path"
"""Key of adapter_config.json for the base's SOURCE."""

_PEFT = "base_model.model."  # before the names of layers in peft's files
_TENSOR = re.compile(r"(.+)\.(\d{1,6})\.(.+?)\.lora_([AB])\.weight")
_OWN = re.compile(r"blocks\.(\d+)\.(.+)\.([AB])")

Tensors = Mapping[str, Tensor]


def save_adapters(
    folder: Path,
    network: Adapted,
    student: Tensors,
    provenance: Mapping[str, Any],
    discriminator: tuple[Tensors, ModelConfig] | None = None,
) -> None:
    """Write the state dict of a student, and that of its discriminator.

    `network` is the student's. Adapters that are in the folder already are replaced; config.json
    comes last.
    """
    roles = {folder: student}
    if discriminator is not None:
        roles[folder / CRITIC] = discriminator[0]
    (folder / CONFIG).unlink(missing_ok=True)
    with files.no_space_as_user_error(folder):
        written = [
            path for place, tensors in roles.items() for path in _write(place, tensors, network)
        ]
        records = {p.relative_to(folder).as_posix(): FileRecord.of(p) for p in written}
        trunk, base = discriminator and discriminator[1], network.adapters.fingerprint
        manifest = Manifest(network.config, records, trunk, dict(provenance), base=base)
        files.write_atomic(folder / CONFIG, manifest.to_bytes())


def _write(folder: Path, tensors: Tensors, network: Adapted) -> list[Path]:
    """Write the files of one role; return those of numbers."""
    prefix, lora, source = network.prefix, network.adapters.lora, network.adapters.source
    if Path(source).exists():
        source = str(Path(source).resolve())
    folder.mkdir(parents=True, exist_ok=True)
    matches = {name: _OWN.fullmatch(name) for name in tensors}
    adapters = {
        f"{_PEFT}{prefix}.{m[1]}.{layer_path(m[2])}.lora_{m[3]}.weight": tensors[name]
        for name, m in matches.items()
        if m
    }
    other = {name: tensors[name] for name, m in matches.items() if m is None}
    paths = sorted({layer_path(m[2]) for m in matches.values() if m})
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        BASE: source,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # A pattern of whole names: names alone would also match layers outside the blocks.
        "target_modules": rf"{re.escape(prefix)}\.\d+\.({'|'.join(map(re.escape, paths))})",
    }
    files.write_atomic(folder / SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())
    save_tensors(folder / ADAPTER, adapters)
    if other:
        save_tensors(folder / OTHER, other)
    else:
        (folder / OTHER).unlink(missing_ok=True)
    return [folder / name for name in (ADAPTER, *([OTHER] if other else []))]


def is_adapter(folder: Path) -> bool:
    """Tell whether didi wrote adapters into a folder."""
    return (folder / SETTINGS).is_file() and is_ours(folder)


def base_of(folder: Path) -> str:
    """SOURCE of the base of adapters; refuse one that is no longer there."""
    source = str(read_object(folder / SETTINGS).get(BASE))
    if source.startswith("/") and not Path(source).exists():
        raise UserError(
            f"{folder} has adapters of {source}, which is not there: write into {SETTINGS}, as "
            f"`{BASE}`, where it is."
        )
    return source


def digests(folder: Path) -> dict[str, str]:
    """Digests of the weights and the base, from config.json, and of LoRA's settings.

    The place of the base is no part of them: it may move.
    """
    manifest, settings = read_manifest(folder), read_object(folder / SETTINGS)
    settings.pop(BASE, None)
    own = {name: record.sha256 for name, record in manifest.files.items()}
    scaled = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return own | {"base": str(manifest.base), SETTINGS: scaled}


def load_adapters(
    folder: Path, fingerprint: str, open_base: Callable[[], LoadedModel]
) -> LoadedModel:
    """Open the base of adapters, and merge them into its weights: as any student to its users.

    `fingerprint` is that of the base as it is now.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        if (damage := record.damage(folder / name)) is not None:
            raise UserError(f"{damage}. Fetch it again.")
    if fingerprint != manifest.base:
        raise UserError(
            f"{folder} holds adapters of another base ({str(manifest.base)[:8]}…) than "
            f"{base_of(folder)} ({fingerprint[:8]}…): write into {SETTINGS}, as `{BASE}`, the one "
            "that they were trained on."
        )
    loaded = open_base()
    base = cast("MaskedLM", loaded.model)
    student = _read(folder, base, manifest.model).merged().eval()
    critic = None
    if manifest.discriminator is not None:
        critic = _read_discriminator(folder / CRITIC, base, manifest.discriminator)
    return LoadedModel(student, manifest.model, loaded.tokenizer, critic, manifest.provenance)


def _read_discriminator(folder: Path, base: MaskedLM, config: ModelConfig) -> Discriminator:
    trunk = _read(folder, shell(base).drop_head(), config).merged()
    with torch.device("cpu"):
        critic = Discriminator(trunk)
    head = {n.removeprefix(HEAD): t for n, t in _tensors(folder / OTHER).items()}
    critic.output_layer.load_state_dict(head)
    return critic.to(base.vectors.device).eval()


def _tensors(path: Path) -> dict[str, Tensor]:
    shapes = {name: shape for name, (_, shape) in read_headers(path).items()}
    return {name: tensor.clone() for name, tensor in read_tensors(path, shapes)}


def _read(folder: Path, base: MaskedLM, config: ModelConfig) -> Adapted:
    """A role from its files, after checking that its layers are the base's."""
    path, settings = folder / ADAPTER, read_object(folder / SETTINGS)
    alpha = positive_number(folder / SETTINGS, settings, "lora_alpha")
    rank = whole_number(folder / SETTINGS, settings, "r")
    lora = LoraConfig(rank=rank, alpha=alpha, checkpointing=False)
    tensors = _tensors(path)
    if not any(rank in tensor.shape for tensor in tensors.values()):  # before it is allocated
        raise UserError(f"{path}: {first_few(tensors)} fit no layer of its base. Fetch it again.")
    known = [layers(block) for block in base.blocks]
    blocks = [dict[str, Lora]() for _ in known]
    odd = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        number, layer = (int(match[2]), match[3]) if match else (0, "")
        if match is None or number >= len(known) or layer not in known[number]:
            odd.append(name)
            continue
        linear = known[number][layer]
        made = Lora(linear.in_features, linear.out_features, lora)
        own = blocks[number].setdefault(layer_key(layer), made)
        target = own.A if match[4] == "A" else own.B
        if tensor.shape != target.shape:
            odd.append(name)
            continue
        target.data = tensor.float()
    if odd:
        raise UserError(f"{path}: {first_few(odd)} fit no layer of its base. Fetch it again.")
    codes = _tensors(folder / OTHER).get("codes") if (folder / OTHER).exists() else None
    if codes is not None:
        base = shell(base)
        base.codes = nn.Parameter(codes)
    parts = nn.ModuleList(nn.ModuleDict(each) for each in blocks)
    role = Adapted(base, parts, AdapterRecord(lora=lora, source="", fingerprint=""))
    role.config = config
    return role.to(base.vectors.device).requires_grad_(False)
