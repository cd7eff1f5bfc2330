"""How long samplers take: seconds of a batch, beside the quality of what they write.

Every setting is drawn once before anything is timed; then all are timed in turns, each round
beginning with another one, so that a machine that warms up or is busy for a while slows all of
them alike. A number is the median of the rounds; the range tells how steady it is.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from didi_instruct.api.model import Model, load
from didi_instruct.api.studio import fast_products
from didi_instruct.errors import UserError
from didi_instruct.evaluation.rows import Row
from didi_instruct.evaluation.samples import text_lengths
from didi_instruct.reproduce.equal_terms import Setting, Terms, measure

TOKENS = 1024
"""Tokens of a text of the paper, which it tells the latency of."""
QUALITY = ("ppl", "ppl_ci95", "entropy", "entropy_ci95", "path_kl", "num_samples", "seed")
Draw = Callable[[int], int]
"""Draws a batch with a seed; returns how many tokens it wrote."""


def interleaved(draws: Sequence[Draw], rounds: int) -> list[list[tuple[float, int]]]:
    """Seconds and tokens of every round of each, after one that does not count."""
    if rounds < 1:
        raise UserError(f"Timing has {rounds} rounds: use 1 or more.")
    for draw in draws:
        draw(0)
    found: list[list[tuple[float, int]]] = [[] for _ in draws]
    for turn in range(rounds):
        for place in range(len(draws)):
            number = (turn + place) % len(draws)
            started = time.perf_counter()
            tokens = draws[number](turn)
            found[number].append((time.perf_counter() - started, tokens))
    return found


def time_settings(
    settings: Sequence[Setting],
    *,
    batch: int = 16,
    rounds: int = 5,
    length: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """A row for each setting; `ratio_to_first` above 1 is faster than the first, per token.

    A round draws one batch, all settings with the same seed. Where texts end, their tokens before
    the end count.
    """
    if not settings:
        raise UserError("There is nothing to time: name a model.")
    sources = dict.fromkeys(setting.source for setting in settings)
    models = {source: load(source, device=device, dtype=dtype) for source in sources}
    draws = [_drawer(s, models[s.source], batch, length) for s in settings]
    with fast_products():
        timed = interleaved(draws, rounds)
    rows = []
    for setting, found in zip(settings, timed, strict=True):
        seconds = [one for one, _ in found]
        rates = [tokens / one for one, tokens in found]
        rows.append(
            {
                "method": setting.method,
                **setting.more,
                "steps": setting.steps,
                "batch": batch,
                "rounds": rounds,
                "device": models[setting.source].device.type,
                "seconds_median": median(seconds),
                "seconds_range": [min(seconds), max(seconds)],
                "seconds_per_sample": median(seconds) / batch,
                "tokens_per_second": median(rates),
                "tokens_per_second_range": [min(rates), max(rates)],
                "seconds_per_1k": TOKENS / median(rates),
            }
        )
    first = rows[0]["tokens_per_second"]
    return [row | {"ratio_to_first": row["tokens_per_second"] / first} for row in rows]


def latency_rows(
    settings: Sequence[Setting],
    terms: Terms,
    *,
    batch: int = 16,
    rounds: int = 5,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """The same with perplexity, entropy and what ran, of samples drawn on the same terms.

    The quality is that of full precision, whatever `dtype` is timed.
    """
    quality = measure(settings, terms).rows
    speed = time_settings(
        settings, batch=batch, rounds=rounds, length=terms.length, device=terms.device, dtype=dtype
    )
    kept = (*QUALITY, "nfe", "passes", "disc_calls", "sampler", "temperature", "top_p", "length")
    return [
        fast | {name: good.get(name) for name in kept}
        for fast, good in zip(speed, quality, strict=True)
    ]


def _drawer(setting: Setting, model: Model, batch: int, length: int | None) -> Draw:
    def draw(seed: int) -> int:
        tokens = model.sample(
            num=batch,
            batch_size=batch,
            steps=setting.steps,
            length=length,
            sampler=setting.sampler,
            options=setting.options,
            temperature=setting.temperature,
            top_p=setting.top_p,
            seed=seed,
        ).cpu()  # waits for the device
        end = model.config.end_id
        return int(text_lengths(tokens, end, end is not None).sum())

    return draw
