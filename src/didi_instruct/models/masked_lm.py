"""Any masked LM of `transformers` as a denoiser: BERT, RoBERTa, ModernBERT, ESM-2, DPLM.

The weights are read by our own readers, which run nothing, and given to the class of
`transformers` by name. Families with code of their own (LLaDA, Dream) need the user's word.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.foreign.stores import Store
from didi_instruct.models.masked_build import Blueprint, silence
from didi_instruct.models.masked_families import FoundMaskedLM, recognise_masked_lm
from didi_instruct.models.masked_ids import SpecialIds, special_ids
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.masked_weights import (
    check_headers,
    common_dtype,
    headers_of,
    read_weights,
    weight_stores,
)
from didi_instruct.models.remote_lm import build_remote, refuse_code
from didi_instruct.models.tensor_files import first_few, shown

__all__ = ["FoundMaskedLM", "MaskedLM", "load_masked_lm", "recognise_masked_lm"]

_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers that have no tokenizer.json, of which `transformers` makes one."""


def load_masked_lm(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Read a folder as `transformers` writes it; the model is a `MaskedLM`.

    `dtype` casts the parameters; None keeps the type that most of them have. What was assumed is
    in the provenance, under `foreign`.
    """
    found = recognise_masked_lm(folder)
    if found is None:
        raise UserError(
            f"{folder}: its config.json is not that of a masked LM of transformers. Give a folder "
            "with config.json, weights and tokenizer of a …ForMaskedLM."
        )
    if found.needs_code and not trust_remote_code:
        refuse_code(found)
    _require_transformers()
    stores = weight_stores(found.path)
    check_headers(found, stores)
    tokenizer = _tokenizer(found)
    ids = special_ids(found, tokenizer)
    with silence():
        network = _network(found, stores, dtype)
    config = _config(found, network, ids)
    model = MaskedLM(network, config, ids, found.family).to(device).eval()
    notes = list(found.notes)
    if found.family.frame == "tokenizer":
        tokenizer = tokenizer.endless()
        notes.append(f"{len(ids.banned)} ids are never written: special tokens and no text.")
    untouched = sorted({name for store in stores for name in store.untouched})
    if untouched:
        notes.append(f"Pickled objects, not run: {first_few(untouched)}.")
    origin = {"source": str(folder), "layout": found.layout, "weights": "only", "notes": notes}
    return LoadedModel(model, config, tokenizer, None, {"foreign": origin})


def _require_transformers() -> None:
    """Every installation has it; one that lost it gets a line instead of a traceback."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(
            'A masked LM needs transformers, which is not here: pip install "transformers>=5.0".'
        ) from error


def _network(found: FoundMaskedLM, stores: list[Store], dtype: torch.dtype | None) -> nn.Module:
    """Build the network; shapes are compared before weights are read."""
    blueprint = None if found.needs_code else Blueprint(found)
    if blueprint is not None:
        blueprint.check(headers_of(stores))
    weights = read_weights(stores, dtype)
    dtype = dtype or common_dtype(weights)
    if blueprint is None:
        return build_remote(found, weights, dtype)
    return blueprint.fill(weights, dtype)


def _config(found: FoundMaskedLM, network: nn.Module, ids: SpecialIds) -> ModelConfig:
    """Correct the length: by the frame that texts really get, and by the rows of positions."""
    length = found.config.length + found.family.specials - len(ids.before) - len(ids.after)
    for name, part in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            length = min(length, part.num_embeddings - first - len(ids.before) - len(ids.after))
    return replace(found.config, length=length)


def _tokenizer(found: FoundMaskedLM) -> Tokenizer:
    """Read the tokenizer, and refuse one that knows more ids than the network."""
    tokenizer = _read_tokenizer(found)
    if tokenizer.size > found.config.num_tokens:
        raise UserError(
            f"{found.path}: the tokenizer has {tokenizer.size} ids and the network "
            f"{found.config.num_tokens}: fetch both again."
        )
    return tokenizer


def _read_tokenizer(found: FoundMaskedLM) -> Tokenizer:
    """Read tokenizer.json or ESM's vocab.txt; other forms through `transformers`."""
    import transformers

    folder = found.path
    if (folder / "tokenizer.json").is_file() or found.model_type == "esm":
        return Tokenizer.load(folder)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{folder} has no tokenizer: put the model's tokenizer.json there.")
    # Dream's tokenizer is Qwen's under a name that only its own code knows.
    kind = (
        transformers.Qwen2Tokenizer if found.model_type == "Dream" else transformers.AutoTokenizer
    )
    try:
        loaded = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # files in any state fail in any way
        reason = shown(" ".join(str(error).split()), 200)
        raise UserError(
            f"{folder} has no tokenizer that can be read ({reason}). "
            "Put the model's tokenizer.json there."
        ) from error
    return Tokenizer.from_transformers(loaded, str(folder))
