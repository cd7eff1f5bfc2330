"""How long samplers take: seconds of a batch, beside the quality of what they write.

On a GPU models are accelerated, as by `didi generate --fast`: passes are compiled and captured, and
a left-to-right model has a static cache. Every setting is drawn before anything is timed
(on a GPU every batch, since each may bring shapes that are captured anew); then all are timed in
turns, so that a machine that warms up or is busy for a while slows all of them alike. A number is
the median of the rounds; the range tells how steady it is. One that does not run, for want of
memory say, has none, and `tokens_per_second_note` tells why. Models of one shape that are sampled
in the same way share one timing, since weights do not change how long it takes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import median

import torch

from didi_instruct.benchmarking.timing import Case, Timing, time_cases
from didi_instruct.errors import UserError
from didi_instruct.evaluation.drawing import fast_products
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.samples import end_of_text, text_lengths
from didi_instruct.hub.sources import ModelInfo, peek_models
from didi_instruct.model import Model, load
from didi_instruct.reproduce.equal_terms import Setting, Terms, measure
from didi_instruct.sampling.registry import find_sampler
from didi_instruct.training.distributed import pick_device

TOKENS = 1024
"""Tokens of a text of the paper, which it tells the latency of."""
QUALITY = ("ppl", "ppl_ci95", "entropy", "entropy_ci95", "path_kl", "num_samples", "seed")


def time_settings(
    settings: Sequence[Setting],
    *,
    batch: int = 16,
    rounds: int = 5,
    length: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    fast: bool = True,
    until_eot: bool = False,
) -> list[Row]:
    """A row for each setting; `ratio_to_first` above 1 is faster than the first, per token.

    A round draws one batch, all settings with the same seed. Where texts end, their tokens before
    the end count; with `until_eot` also those of a model that writes on after it.
    """
    if not settings:
        raise UserError("There is nothing to time: name a model.")
    if rounds < 1:
        raise UserError(f"Timing has {rounds} rounds: use 1 or more.")
    shapes = {model.source: model for model in peek_models([s.source for s in settings])}
    ways = [_way(setting, shapes[setting.source], until_eot) for setting in settings]
    alike: dict[Hashable, Setting] = {}
    for setting, way in zip(settings, ways, strict=True):
        alike.setdefault(way, setting)
    place = pick_device(device)
    fast = fast and place.type == "cuda"
    sources = dict.fromkeys(setting.source for setting in alike.values())
    models = {source: load(source, device=device, dtype=dtype, fast=fast) for source in sources}
    written: list[list[int]] = [[] for _ in alike]
    warm_up = rounds if fast else 1
    cases = [
        _case(setting, models[setting.source], batch, length, warm_up, until_eot, tokens)
        for setting, tokens in zip(alike.values(), written, strict=True)
    ]
    with fast_products():
        timed = time_cases(cases, rounds, place, warm_up=warm_up, measure_held=False)
    if all(one.failure for one in timed):
        raise RuntimeError(f"no setting ran: {timed[0].failure}")
    found = {
        way: {
            "batch": batch,
            "rounds": rounds,
            "device": place.type,
            "accelerated": models[setting.source].is_accelerated,
            **_numbers(one, tokens[warm_up:], batch),
        }
        for (way, setting), one, tokens in zip(alike.items(), timed, written, strict=True)
    }
    rows: list[Row] = [
        {"method": setting.method, **setting.more, "steps": setting.steps, **found[way]}
        for setting, way in zip(settings, ways, strict=True)
    ]
    first = rows[0]["tokens_per_second"]
    for row in rows:
        rate = row["tokens_per_second"]
        row["ratio_to_first"] = rate / first if rate and first else None
    return rows


def _way(setting: Setting, model: ModelInfo, until_eot: bool) -> Hashable:
    """What decides how long a setting takes, equal for those that share a timing.

    Weights do not, where neither what a step writes nor where a text ends follows from them: in
    ancestral sampling of texts that fill their windows, or whose lengths are drawn first.
    """
    sampler, config = find_sampler(setting.sampler, model.config.kind), model.config
    options = sampler.all_options(setting.options, config.order)
    by_chance = sampler.name == "ancestral" and (config.end_id is not None or not until_eot)
    return (
        replace(config, order="random") if by_chance else setting.source,
        sampler.name,
        tuple(sorted((name, str(value)) for name, value in options.items())),
        setting.steps,
        setting.temperature,
        setting.top_p,
    )


def _numbers(timing: Timing, tokens: Sequence[int], batch: int) -> Row:
    if timing.failure is not None:
        return {"tokens_per_second": None, "tokens_per_second_note": timing.failure}
    seconds = timing.seconds
    rates = [count / one for count, one in zip(tokens, seconds, strict=True)]
    return {
        "seconds_median": median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "seconds_per_sample": median(seconds) / batch,
        "tokens_per_second": median(rates),
        "tokens_per_second_range": [min(rates), max(rates)],
        "seconds_per_1k": TOKENS / median(rates),
    }


def untimed(rows: Sequence[Row]) -> list[str]:
    """Which rows have no speed, and why, a sentence each."""
    told = [
        f"{row['method']} at {row['nfe']} NFE was not timed: {row['tokens_per_second_note']}."
        for row in rows
        if row.get("tokens_per_second_note")
    ]
    return list(dict.fromkeys(told))


def latency_rows(
    settings: Sequence[Setting],
    terms: Terms,
    *,
    batch: int = 16,
    rounds: int = 5,
    dtype: torch.dtype | None = None,
    fast: bool = True,
) -> list[Row]:
    """The same with perplexity, entropy and what ran, of samples drawn on the same terms.

    The quality is that of full precision, whatever `dtype` is timed.
    """
    quality = measure(settings, terms).rows
    speed = time_settings(
        settings,
        batch=batch,
        rounds=rounds,
        length=terms.length,
        device=terms.device,
        dtype=dtype,
        fast=fast,
        until_eot=terms.until_eot,
    )
    kept = (*QUALITY, "nfe", "passes", "disc_calls", "sampler", "temperature", "top_p", "length")
    return [
        fast | {name: good.get(name) for name in kept}
        for fast, good in zip(speed, quality, strict=True)
    ]


def _case(
    setting: Setting,
    model: Model,
    batch: int,
    length: int | None,
    warm_up: int,
    until_eot: bool,
    written: list[int],
) -> Case:
    """Draws batch after batch; how many tokens each has is added to `written`."""

    def run(_: int) -> None:
        tokens = model.sample(
            num=batch,
            batch_size=batch,
            steps=setting.steps,
            length=length,
            sampler=setting.sampler,
            options=setting.options,
            temperature=setting.temperature,
            top_p=setting.top_p,
            # Another for every round, since texts differ in length; those of the warm-up again.
            seed=len(written) - warm_up if len(written) >= warm_up else len(written),
        ).cpu()  # waits for the device
        written.append(int(text_lengths(tokens, end, ends).sum()))

    own = model.config.end_id
    end, ends = end_of_text(model.tokenizer, own), until_eot or own is not None
    window = length or model.config.length
    return Case(
        name=setting.method, run=run, batch=batch, length=window, steps=setting.steps or window
    )
