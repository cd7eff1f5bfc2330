"""Untrained networks: a baseline of the same shape as a model."""

import copy
from collections.abc import Sequence

import torch

from didi_instruct.model import Model
from didi_instruct.seeding import mix
from didi_instruct.tasks.task import NamedModel

INIT_STD = 0.02


def untrained(model: Model, seed: int = 0) -> Model:
    """A copy whose weights are noise: matrices N(0, 0.02²), gains of norms 1, biases 0.

    The output layer is noise too, where training would begin from zeros: then all answers would be
    equally likely.
    """
    twin = Model(copy.deepcopy(model.network), model.config, model.tokenizer)
    generator = torch.Generator().manual_seed(mix(seed, "untrained"))
    with torch.no_grad():
        for name, weight in twin.network.named_parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator) * INIT_STD
                weight.copy_(noise.to(weight.device, weight.dtype))
            else:
                weight.fill_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
    return twin


def untrained_of(models: Sequence[NamedModel], seed: int = 0) -> list[NamedModel]:
    """An untrained network for each shape among the models, named after the first that has it."""
    shapes: dict[object, NamedModel] = {}
    for entry in models:
        config, tokenizer = entry.model.config, entry.model.tokenizer
        weights = tuple((n, tuple(w.shape)) for n, w in entry.model.network.named_parameters())
        reads = config.kind, config.length, config.time_conditioning, config.end_id
        key = weights, reads, None if tokenizer is None else tokenizer.hash
        shapes.setdefault(key, entry)
    return [NamedModel(f"untrained {e.name}", untrained(e.model, seed)) for e in shapes.values()]
