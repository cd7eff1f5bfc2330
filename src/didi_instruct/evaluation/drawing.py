"""Samples of models, drawn once for every setting and kept in a folder."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from didi_instruct.data.files import exclusive
from didi_instruct.evaluation.cache import model_key, samples_key
from didi_instruct.evaluation.measuring import Progress
from didi_instruct.evaluation.samples import (
    Origin,
    SampleSet,
    read_samples,
    texts_of,
    write_samples,
)
from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import find_sampler


def draw_samples(
    source: str,
    model: Model,
    requests: Sequence[Request],
    *,
    folder: Path,
    until_eot: bool = False,
    stage: str = "Drawing",
    progress: Progress | None = None,
) -> list[SampleSet]:
    """Samples of a model for every request, read from the folder, or drawn where they are missing.

    Each set has a file of its own, written whole: an interruption loses the one at work. Another
    process that needs the same set waits for it.
    """
    weights, config = model_key(source, model.cast), model.config
    tokenizer = model.tokenizer.hash if model.tokenizer else None
    until_eot = until_eot or config.end_id is not None
    found = []
    for number, request in enumerate(requests):
        if progress is not None:
            progress(stage, number, len(requests))
        sampler = find_sampler(request.sampler, config.kind)
        options = sampler.all_options(request.options, config.order)
        name = samples_key(
            weights,
            tokenizer,
            request,
            sampler=sampler.name,
            options=options,
            device=model.device.type,
            has_path=request.measure_path or config.masks == 1,  # free with one mask
            until_eot=until_eot,
        )
        path = folder / "samples" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = None
        if not path.exists():
            with exclusive(path):
                if not path.exists():
                    drawn = _draw(source, weights, model, request, sampler.name, options, until_eot)
                    write_samples(path, drawn)
        kept = drawn or read_samples(path)
        found.append(replace(kept, origin=replace(kept.origin, model=source)))
    if progress is not None:
        progress(stage, len(requests), len(requests))
    return found


def _draw(
    source: str,
    weights: str,
    model: Model,
    request: Request,
    sampler: str,
    options: Mapping[str, Any],
    until_eot: bool,
) -> SampleSet:
    started = time.perf_counter()
    with fast_products():
        drawn, config = model.request(request), model.config
    tokens = drawn.tokens.cpu()  # waits for the device
    # The path of a model with several masks takes passes that sampling does not.
    timed = config.masks == 1 or not request.measure_path
    seconds = time.perf_counter() - started if timed else None
    origin = Origin(
        model=source,
        fingerprint=weights,
        tokenizer=model.tokenizer.hash if model.tokenizer else None,
        sampler=sampler,
        steps=request.steps or drawn.nfe,
        nfe=drawn.nfe,
        passes=drawn.passes,
        disc_calls=drawn.disc_calls,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        length=tokens.shape[1],
        until_eot=until_eot,
        seconds=seconds,
        options=options,
        batch_size=request.batch_size,
        device=_device_name(model.device),
        dtype=model.cast,
        own_window=config.end_id is not None and config.kind == "mdlm" and request.length is None,
    )
    log_prob = None if drawn.log_prob is None else drawn.log_prob.double().cpu()
    texts, lengths = texts_of(model.tokenizer, tokens, until_eot, config.end_id)
    return SampleSet(origin, tokens, texts, log_prob, lengths)


@contextmanager
def fast_products() -> Iterator[None]:
    """Within, GPUs multiply float32 matrices as TensorFloat-32, several times faster.

    It rounds the model's logits; samples and their probabilities are exact for the rounded ones.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _device_name(device: torch.device) -> str:
    """A GPU by its name: numbers of speed are of it."""
    if device.type != "cuda":
        return device.type
    return f"{device.type} ({torch.cuda.get_device_name(device)})"
