"""ESMFold (`EsmForProteinFolding` of transformers): found, checked and read, and its predictions.

Nothing of a source is run. Weights come through our own readers, also from `pytorch_model.bin`,
and names and shapes are compared with a network on the meta device before a number is read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from didi_instruct.data.files import sha256_file
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, read_object
from didi_instruct.models.foreign.hub import fetch
from didi_instruct.models.masked_lm import WeightFiles, explained, load_transformers, silence
from didi_instruct.models.tensor_files import check_shapes, first_few, shown, shown_value
from didi_instruct.proteins.structures import RESIDUE_ORDER, Structure

ARCHITECTURE = "EsmForProteinFolding"

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# Tables that are computed, and tensors of tasks that folding has no use for.
_COMPUTED = re.compile(
    r"(^|\.)(contact_head|pooler|position_ids|position_embeddings|inv_freq|af2_to_esm|"
    r"default_frames|group_idx|atom_mask|lit_positions)(\.|$)"
)
# Settings that say how often something is repeated, by their place in config.json.
_FOLD, _TRUNK, _MODULE = "esmfold_config", "trunk", "structure_module"
_COUNTS = (
    ("num_hidden_layers",),
    (_FOLD, _TRUNK, "num_blocks"),
    (_FOLD, _TRUNK, "max_recycles"),
    (_FOLD, _TRUNK, _MODULE, "num_blocks"),
    (_FOLD, _TRUNK, _MODULE, "num_transition_layers"),
    (_FOLD, _TRUNK, _MODULE, "num_resnet_blocks"),
)
_MOST_POSITIONS = 1 << 20
_IDS = {letter: n for n, letter in enumerate(RESIDUE_ORDER)}


@dataclass(frozen=True)
class FoldingFiles:
    """A folding model by its headers; `name` is how the source was written."""

    name: str
    path: Path
    settings: dict[str, Any]
    """config.json."""
    weights: WeightFiles

    @property
    def passes(self) -> int:
        """Passes of the trunk that the model was trained for: one, and its recycles."""
        return int(self.settings[_FOLD][_TRUNK]["max_recycles"])

    def fingerprint(self) -> str:
        """Hash of config.json and of all weights: what a fold depends on."""
        files = {store.path.name: sha256_file(store.path) for store in self.weights.stores}
        files[CONFIG] = sha256_file(self.path / CONFIG)
        return sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def open_folding(source: str | Path) -> FoldingFiles:
    """Find a folding model in a folder or on the hub, and check all but its numbers."""
    path = _find(source)
    settings = read_object(path / CONFIG)
    classes = settings.get("architectures")
    if not isinstance(classes, list) or ARCHITECTURE not in classes:
        says = f"says {shown_value(classes)}" if classes else "names no architecture"
        raise UserError(
            f"{source} holds no folding weights: its {CONFIG} {says}, and has to say "
            f"{ARCHITECTURE}. Give facebook/esmfold_v1, or a folder like it."
        )
    if settings.get("auto_map"):
        raise UserError(
            f"{source} brings code of its own, which is never run: use facebook/esmfold_v1."
        )
    files = FoldingFiles(str(source), path, settings, WeightFiles(path))
    _check_settings(files)
    with silence():
        _check_names(files, _on_meta(files))
    return files


def _find(source: str | Path) -> Path:
    """Return the folder of a source, fetched from the hub if that is where it is."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(
            f"{source} is a file: give the folder of a folding model, with {CONFIG} and weights."
        )
    match = _HUB_ID.fullmatch(str(source))
    if match is None or isinstance(source, Path):
        raise UserError(
            f"{source}: no folding weights there. Give a folder, or a Hugging Face id such as "
            "facebook/esmfold_v1."
        )
    try:
        return fetch(match[1], match[2])
    except UserError as error:
        raise UserError(f"No folding weights: {error}") from error


def _check_settings(files: FoldingFiles) -> None:
    """Refuse a config.json that would ask for more than its weights can have."""
    most = len(files.weights.headers)
    for place in _COUNTS:
        value: Any = files.settings
        for name in place:
            value = value.get(name) if isinstance(value, dict) else None
        if type(value) is not int or not 1 <= value <= most:
            raise UserError(
                f"{files.path / CONFIG}: `{'.'.join(place)}` is {shown_value(value)}, and has to "
                f"be a whole number from 1 to {most}. Fetch it again."
            )
    positions, words = (files.settings.get(n) for n in ("max_position_embeddings", "vocab_list"))
    if type(positions) is not int or not 1 <= positions <= _MOST_POSITIONS:
        raise UserError(
            f"{files.path / CONFIG}: `max_position_embeddings` is {shown_value(positions)}, and "
            f"has to be a whole number from 1 to {_MOST_POSITIONS}. Fetch it again."
        )
    if not isinstance(words, list) or len(words) != files.settings.get("vocab_size"):
        raise UserError(
            f"{files.path / CONFIG}: `vocab_list` does not have the `vocab_size` entries of ESM's "
            "vocabulary. Fetch it again."
        )


def _configuration(library: Any, settings: Mapping[str, Any]) -> Any:
    """Settings of transformers, with those alone that describe the network."""
    from transformers.models.esm import configuration_esm as esm

    def own(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name in kind.__annotations__}

    fold = settings[_FOLD]
    trunk = own(esm.TrunkConfig, fold[_TRUNK])
    trunk[_MODULE] = own(esm.StructureModuleConfig, trunk[_MODULE])
    # 16-bit floats with five bits of exponent give NaN (transformers#47470).
    folding = own(esm.EsmFoldConfig, fold) | {_TRUNK: trunk, "fp16_esm": False}
    changes = {_FOLD: folding, "is_folding_model": True, "is_decoder": False}
    config = library.EsmConfig(**own(library.EsmConfig, settings) | changes)
    config._attn_implementation = "eager"
    return config


def _on_meta(files: FoldingFiles) -> nn.Module:
    library = load_transformers()
    with explained(*_unbuildable(files, library)), torch.device("meta"):
        network: nn.Module = library.EsmForProteinFolding(_configuration(library, files.settings))
    return network


def _unbuildable(files: FoldingFiles, library: Any) -> tuple[str, str]:
    problem = f"{files.path / CONFIG}: transformers {library.__version__} cannot build the network"
    return f"{problem} that it describes", "Fetch it again, or mend that setting."


def _check_names(files: FoldingFiles, network: nn.Module) -> None:
    headers = files.weights.headers
    expected = {n: tuple(p.shape) for n, p in network.named_parameters() if not _COMPUTED.search(n)}
    found = {name: header.shape for name, header in headers.items() if not _COMPUTED.search(name)}
    check_shapes(files.path, found, expected, f"the {ARCHITECTURE} that its {CONFIG} describes")
    if packed := [name for name in expected if not headers[name].is_weight]:
        types = first_few(packed, lambda n: f"{shown(n)} {headers[n].dtype}")
        raise UserError(
            f"{files.path}: tensors are not real numbers of 16 bits or more ({types}). Use the "
            "checkpoint that is not quantised."
        )


def load_folding(files: FoldingFiles, device: torch.device | str, bf16: bool) -> nn.Module:
    """Read the network in float32; its language model in bfloat16 if `bf16`."""
    library = load_transformers()
    weights = {n: t for n, t in files.weights.read().items() if not _COMPUTED.search(n)}
    with silence(), explained(*_unbuildable(files, library)):
        network: Any = library.EsmForProteinFolding.from_pretrained(
            None,
            config=_configuration(library, files.settings),
            state_dict=weights,
            dtype=torch.float32,
            local_files_only=True,
        )
    if bf16:
        network.esm.to(torch.bfloat16)
    ready: nn.Module = network.eval().requires_grad_(False)
    try:
        return ready.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in ready.parameters()) / 2**30
        raise UserError(
            f"The weights of {files.name} need {size:.1f} GiB, which {device} does not have free: "
            "run its language model in bfloat16, or fold on the CPU."
        ) from error


@torch.no_grad()
def predict(
    network: nn.Module, sequences: Sequence[str], recycles: int | None = None
) -> list[Structure]:
    """Fold sequences in one batch. Letters other than the 20 amino acids are unknown residues."""
    device = next(network.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    residues = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(residues)
    for row, sequence in enumerate(sequences):
        ids = [_IDS.get(letter, len(RESIDUE_ORDER)) for letter in sequence]
        residues[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    out = network(residues.to(device), attention_mask=mask.to(device), num_recycles=recycles)
    # Of 14 atoms a residue, in an order of its own, to 37 with one place for each name.
    index = out.residx_atom37_to_atom14[..., None].expand(-1, -1, -1, 3)
    positions = _array(out.positions[-1].gather(2, index))
    exists, plddt = _array(out.atom37_atom_exists) > 0.5, 100 * _array(out.plddt)
    return [
        Structure(sequence, positions[row, :n], exists[row, :n], plddt[row, :n])
        for row, (sequence, n) in enumerate(zip(sequences, lengths, strict=True))
    ]


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    array: np.ndarray[Any, np.dtype[np.float32]] = tensor.float().cpu().numpy()
    return array


def write_random_folding(folder: Path, seed: int = 0) -> nn.Module:
    """Write a tiny folding model with random weights, in files like those of esmfold_v1."""
    library = load_transformers()
    module = {
        "sequence_dim": 16, "pairwise_dim": 8, "ipa_dim": 4, "resnet_dim": 8, "num_heads_ipa": 2,
        "num_qk_points": 2, "num_v_points": 2, "num_blocks": 2,
    }  # fmt: skip
    trunk = {
        "num_blocks": 2, "sequence_state_dim": 16, "pairwise_state_dim": 8, "max_recycles": 2,
        "sequence_head_width": 8, "pairwise_head_width": 4, "chunk_size": None, _MODULE: module,
    }  # fmt: skip
    with silence():
        config = library.EsmConfig(
            vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=24, max_position_embeddings=1026,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, token_dropout=True,
            position_embedding_type="rotary", is_folding_model=True, layer_norm_eps=1e-5,
            esmfold_config={"fp16_esm": False, "lddt_head_hid_dim": 8, _TRUNK: trunk},
        )  # fmt: skip
        network: Any = library.EsmForProteinFolding(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "norm" not in name.lower():
                    # So that confidences spread over their range.
                    scale = 1.5 if name.startswith("lddt_head") else 0.3
                    parameter.normal_(0, scale, generator=generator)
        folder.mkdir(parents=True, exist_ok=True)
        network.save_pretrained(folder, save_original_format=False)
    ready: nn.Module = network.eval()
    return ready
