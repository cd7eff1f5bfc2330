"""A folder of samples and numbers: what was drawn and measured once is not done again."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from didi_instruct.api.plan import Plan, plan_of_baseline
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.evaluation.describing import describe
from didi_instruct.evaluation.kept import content_key, judge_once, key, measure_once
from didi_instruct.evaluation.measuring import Measured, Measuring, Progress, Yardstick
from didi_instruct.evaluation.samples import (
    VERSION,
    Origin,
    SampleSet,
    read_samples,
    text_lengths,
    write_samples,
)
from didi_instruct.hub.sources import DidiFolder, find_source
from didi_instruct.model import Model
from didi_instruct.models.checkpoint import read_manifest
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.registry import find_sampler


class Studio:
    """A folder of samples and of what was measured of them; nothing in it is done twice.

    Every setting and every measure has a file of its own, written whole: what is interrupted loses
    the one at work, and two evaluations may share a folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(
        self,
        source: str,
        model: Model,
        plan: Plan,
        progress: Progress | None = None,
        stage: str | None = None,
    ) -> list[SampleSet]:
        """Samples of a model for every row, drawn now where they are missing."""
        weights = sampling_fingerprint(source)
        if model.cast is not None:  # other numbers, another model
            weights = key(weights, model.cast)
        tokens = model.tokenizer.hash if model.tokenizer else None
        sampler = find_sampler(plan.sampler, model.config.kind)
        wishes = list(plan.requests(sampler.counts_tokens))
        until_eot = plan.until_eot or model.config.end_id is not None
        stage, found = stage or f"Drawing {source}", []
        for number, wish in enumerate(wishes):
            if progress is not None:
                progress(stage, number, len(wishes))
            # The batch size changes no token, but what the tokens cost, which is kept with them.
            settings = asdict(wish) | {
                "sampler": sampler.name,
                "options": sampler.all_options(wish.options, model.config.order),
                "device": model.device.type,  # GPUs round otherwise
                "measure_path": wish.measure_path or model.config.masks == 1,  # free with one
            }
            name = key(VERSION, weights, tokens, settings, until_eot)
            path = self.folder / "samples" / f"{name}.jsonl"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_samples(path, _draw(source, weights, model, wish, until_eot))
            kept = read_samples(path)
            found.append(replace(kept, origin=replace(kept.origin, model=source)))
        if progress is not None:
            progress(stage, len(wishes), len(wishes))
        return found

    def draw_baseline(
        self, source: str, model: Model, plan: Plan, progress: Progress | None = None
    ) -> list[SampleSet]:
        """Samples of what others are compared with."""
        stage = f"Drawing {source}, the baseline"
        return self.draw(source, model, plan_of_baseline(plan, model), progress, stage)

    def measure(
        self,
        samples: SampleSet,
        metrics: Sequence[str],
        yardstick: Yardstick,
        progress: Callable[[int], None] | None = None,
    ) -> Measured:
        """One row, and the numbers of each sample; a measure that was taken before is read.

        `progress` is told how many of the samples are done, as if all measures took equally long.
        """
        finished = 0

        def tell(_: str, done: int, total: int) -> None:
            if progress is not None:
                progress(int(len(samples) * (finished + done / total) / len(metrics)))

        folder = self.folder / "measured" / content_key(samples)
        judge = yardstick.judge.fingerprint if yardstick.judge else ""
        measuring = Measuring(
            samples, yardstick, tell, lambda name, make: judge_once(name, judge, make, folder)
        )
        found = Measured(describe(samples, yardstick.seed))
        for name in metrics:
            found |= measure_once(name, measuring, folder)
            finished += 1
        return found


def sampling_fingerprint(source: str) -> str:
    """Of all that samples depend on: weights, settings, tokenizer and discriminator."""
    found = find_source(source)
    if not isinstance(found, DidiFolder):
        return key(found.digests())  # its settings are in a file too
    manifest = read_manifest(found.path)
    other = manifest.discriminator and asdict(manifest.discriminator)
    return key(found.digests(), asdict(manifest.model), other)


def end_of_text(tokenizer: Tokenizer | None, end_id: int | None) -> int | None:
    """What ends a text: the model's own `end_id`, else its tokenizer's end-of-text."""
    return tokenizer.eot_id if end_id is None and tokenizer is not None else end_id


def texts_of(
    tokenizer: Tokenizer | None, tokens: Tensor, until_eot: bool, end_id: int | None = None
) -> tuple[tuple[str, ...], Tensor]:
    """Text of the tokens that count, and how many do: a judge of texts reads what others count.

    `end_id` ends a text where the model has one; else the tokenizer's end-of-text does.
    """
    lengths = text_lengths(tokens, end_of_text(tokenizer, end_id), until_eot)
    if tokenizer is None:
        return ("",) * len(tokens), lengths
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return tuple(tokenizer.decode_batch([row[:end] for row, end in rows])), lengths


def _draw(source: str, weights: str, model: Model, wish: Request, until_eot: bool) -> SampleSet:
    started = time.perf_counter()
    with fast_products():
        drawn, config = model.request(wish), model.config
    tokens = drawn.tokens.cpu()  # waits for the device
    # Measuring the path of a model with several masks takes passes that sampling does not.
    timed = config.masks == 1 or not wish.measure_path
    seconds = time.perf_counter() - started if timed else None
    sampler = find_sampler(wish.sampler, config.kind)
    origin = Origin(
        model=source,
        fingerprint=weights,
        tokenizer=model.tokenizer.hash if model.tokenizer else None,
        sampler=sampler.name,
        steps=wish.steps or drawn.nfe,
        nfe=drawn.nfe,
        passes=drawn.passes,
        disc_calls=drawn.disc_calls,
        temperature=wish.temperature,
        top_p=wish.top_p,
        seed=wish.seed,
        length=tokens.shape[1],
        until_eot=until_eot,
        seconds=seconds,
        options=sampler.all_options(wish.options, config.order),
        batch_size=wish.batch_size,
        device=_name(model.device),
        dtype=model.cast,
        own_window=config.end_id is not None and config.kind == "mdlm" and wish.length is None,
    )
    log_prob = None if drawn.log_prob is None else drawn.log_prob.cpu()
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


def _name(device: torch.device) -> str:
    """What numbers of speed are of: a GPU by its name."""
    if device.type != "cuda":
        return device.type
    return f"{device.type} ({torch.cuda.get_device_name(device)})"
