"""Experiment on latency: seconds of a batch, beside the quality of what is sampled.

On a GPU models are accelerated, as by `didi generate --fast`: passes are compiled and captured, and
a left-to-right model has a static cache. Every setting is warmed up before anything is timed (on a
GPU with every batch, since each may bring new shapes to capture); then settings are interleaved, so
that a machine that is busy for a while slows all of them alike. A number is the median of the
rounds, with their range. A setting that fails, for want of memory say, has no number;
`tokens_per_second_note` holds the reason. Models of one shape that are sampled in the same way
share one timing.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from didi_instruct.benchmarking.timing import Case, Timing, time_cases
from didi_instruct.errors import UserError
from didi_instruct.evaluation.drawing import fast_products
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.evaluation.samples import end_of_text, text_lengths
from didi_instruct.hub.sources import ModelInfo, peek_models
from didi_instruct.model import Model, load
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.lines import Answers, Experiment, Line
from didi_instruct.reproduce.measure import (
    Rows,
    Setting,
    Terms,
    measure,
    terms_of,
)
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PPL, Shown, Table
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
    """Key of everything that decides how long a setting takes; equal keys share a timing.

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
    """Notes on rows without a speed, with the reason."""
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
    """Rows of latency with perplexity, entropy and passes of samples drawn on the same terms.

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


def latency(
    context: Context,
    *,
    steps: Mapping[str, int],
    labels: Mapping[str, str],
    samplers: Mapping[str, str | None],
    guidance: Mapping[str, Any],
    batch: int,
    rounds: int,
    machine: str,
    fast: bool,
    **common: Any,
) -> Rows:
    """Time and quality of the models in `steps`, which are inputs by role; `machine` is told only.

    A role that ends in `-greedy` is that model without chance; `guidance` are options of RGAS. On a
    GPU bfloat16 is timed, as in the paper; with `fast`, of accelerated models.
    """
    half = pick_device(context.device).type == "cuda"
    settings = [
        Setting(
            method=labels[role],
            source=context.inputs[role.removesuffix("-greedy")],
            steps=None if role.startswith("ar") else nfe,
            sampler=samplers.get(role),
            options=guidance if samplers.get(role) == "rgas" else {},
            temperature=0.0 if role.endswith("-greedy") else 1.0,
            more={"role": role, "machine": machine},
        )
        for role, nfe in steps.items()
    ]
    dtype = torch.bfloat16 if half else None
    terms = terms_of(context, **common)
    return latency_rows(settings, terms, batch=batch, rounds=rounds, dtype=dtype, fast=fast)


SPEEDS = (
    Shown("nfe", "NFE", ".0f"),
    PASSES,
    Shown("tokens_per_second", "tokens/s", ",.0f"),
    Shown("seconds_per_1k", "s per 1,024 tokens", ".3g"),
    Shown("ratio_to_ar", "times AR", ".2f"),
    PPL,
    ENTROPY,
)
GREEDY, GREEDY_LABEL = "ar-greedy", f"{METHODS['ar'].label}, greedy"
"""The role of the left-to-right model that takes the most probable token, as the paper's does."""


def _latency_job(scale: Scale) -> Job:
    """Time of one machine: its name is part of what decides the numbers."""
    seed, known = scale.seeds[0], provenance()
    roles = {role: nfe for role, nfe in scale.latency.items() if scale.has(role)}
    greedy = {GREEDY: roles["ar"]} if "ar" in roles else {}
    models: dict[str, Job | str] = {
        "teacher": scale.teacher,
        "didi": scale.ablated(ALL_TRICKS, seed, scale.latency["didi"]),
    }
    others = {role: scale.model(role, seed) for role in roles if role not in models}
    return Job(
        name="latency",
        does="latency",
        timed=True,
        inputs={**models, **others, "judge": scale.judge},
        options={
            "steps": greedy | roles,
            "labels": {role: METHODS[role].label for role in roles}
            | dict.fromkeys(greedy, GREEDY_LABEL),
            "guidance": dict(scale.guidance),
            "samplers": {role: METHODS[role].sampler for role in roles},
            "batch": scale.latency_batch,
            "rounds": 5,
            "machine": known.get("GPU", known["CPU"]),
            "fast": True,
            **scale.drawing(seed),
        },
    )


def _latency_table(scale: Scale, answers: Answers) -> Table:
    rows = answers.rows()
    ar = next((row["tokens_per_second"] for row in rows if row["role"] == GREEDY), None)
    theirs = paper.LATENCY["ar"].tokens_per_second
    return Table(
        rows=[row | {"ratio_to_ar": _over(row["tokens_per_second"], ar)} for row in rows],
        across=None,
        shown=SPEEDS,
        paper=[
            {
                "method": GREEDY_LABEL if role == "ar" else METHODS[role].label,
                **speed._asdict(),
                "ratio_to_ar": speed.tokens_per_second / theirs,
            }
            for role, speed in paper.LATENCY.items()
        ],
        notes=[
            f"Batches of {scale.latency_batch}, after a warm-up the median of five rounds in which "
            "all take turns. On a GPU models are accelerated (`--fast`): passes are compiled and "
            "captured, AR has a static cache; RGAS counts with its discriminator, which is "
            "compiled alone.",
            "AR is timed greedy, as in the paper and as what the others are compared with, and "
            "sampled as the others are: greedy texts have no variety to compare.",
            "The paper compares at matched perplexity, on an H100 in bfloat16. Speeds of two "
            "machines or two sizes do not compare: read rows of one table.",
            *untimed(rows),
        ],
    )


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


LATENCY_ITEMS = (
    Experiment(
        name="latency",
        title="Latency and throughput",
        where='Appendix "Practical Latency and Throughput Analysis", table',
        lines=lambda scale: [Line(_latency_job(scale))],
        table=_latency_table,
        equal_minutes=True,
    ),
)
