"""Facts about models for `didi info`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.models.build import count_discriminator_parameters, count_parameters
from didi_instruct.models.checkpoint import load_model


def describe_architecture(name: str) -> dict[str, Any]:
    """Facts about a named architecture, without allocating it."""
    config = architecture(name)
    parameters = count_parameters(config)
    return {"architecture": name, **_facts(config, parameters, parameters)}


def describe_folder(folder: str) -> dict[str, Any]:
    """Facts about a model on disk, its files verified."""
    loaded = load_model(Path(folder))
    parameters = list(loaded.model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    facts = {"architecture": loaded.config.kind, **_facts(loaded.config, total, trainable)}
    if loaded.discriminator is None:
        facts["discriminator_parameters"] = None
    facts["tokenizer_hash"] = loaded.tokenizer.hash if loaded.tokenizer else None
    facts["provenance"] = loaded.provenance
    return facts


def _facts(config: ModelConfig, parameters: int, trainable: int) -> dict[str, Any]:
    shape = asdict(config)
    return {
        "parameters": parameters,
        "trainable_parameters": trainable,
        "vocab_size": config.vocab_size,
        "mask_id": config.mask_id,
        "length": config.length,
        "discriminator_parameters": (
            None if config.kind == "ar" else count_discriminator_parameters(config)
        ),
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "time_conditioning": config.time_conditioning,
        "schedule": shape["schedule"],
        "megabytes_float32": round(parameters * 4 / 2**20),
        "megabytes_bfloat16": round(parameters * 2 / 2**20),
    }
