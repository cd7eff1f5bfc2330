"""What a row says before anything is measured, and which rows belong into one table."""

from collections.abc import Sequence

from didi_instruct.errors import UserError
from didi_instruct.evaluation.measuring import Row, mean_interval
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.evaluation.samples import OF_TEXT, SampleSet

KEYS = (
    "sampler", "steps", "nfe", "passes", "disc_calls", "temperature", "top_p", "num_samples",
    "length", "ppl", "ppl_ci95", "entropy", "entropy_ci95", "mauve", "self_bleu", "unique_4gram",
    "vsf", "path_entropy", "path_kl", "gap_closed", "ar_kl", "c2st_auc", "tokens_per_second",
    "seed",
)  # fmt: skip
"""What every row of `didi eval --json` has, null where it was not measured: scripts rely on it."""


def complete(row: Row) -> Row:
    """The row with every key that scripts rely on."""
    return row | dict.fromkeys(key for key in KEYS if key not in row)


def describe(samples: SampleSet, seed: int = 0) -> Row:
    """What a row says of its samples before anything is measured; the seed is of intervals."""
    origin, count = samples.origin, len(samples)
    lengths = samples.lengths.double()
    short = origin.until_eot and origin.ends_with_text  # what fills a window is not written
    tokens = int(samples.lengths.sum()) if short else count * origin.length
    return {
        "model": origin.model,
        "fingerprint": origin.fingerprint,
        "sampler": origin.sampler,
        "options": None if origin.options is None else dict(origin.options),
        "steps": origin.steps,
        "nfe": origin.nfe,
        "passes": origin.passes,
        "disc_calls": origin.disc_calls,
        "temperature": origin.temperature,
        "top_p": origin.top_p,
        "num_samples": count,
        "length": origin.length,
        "mean_length": lengths.mean().item(),
        "mean_length_ci95": mean_interval(lengths, seed),
        "entropy_of": "text" if origin.until_eot else "window",
        "batch_size": origin.batch_size,
        "device": origin.device,
        "dtype": origin.dtype,
        "tokens_per_second": tokens / origin.seconds if origin.seconds else None,
        "seed": origin.seed,
        "bootstrap_seed": seed,
    }


def check_comparable(
    sets: Sequence[SampleSet], metrics: Sequence[str] = (), num: int | None = None
) -> None:
    """Refuse samples whose numbers do not belong into one table.

    `num` is how many samples will be drawn beside them, if any will.
    """
    if not sets:
        raise UserError("There are no samples to measure.")
    first = sets[0].origin
    for other in (s.origin for s in sets[1:] if s.origin.sampler != OF_TEXT):
        if other.tokenizer != first.tokenizer:
            raise UserError(
                f"{first.model} and {other.model} have different tokenizers: entropy and n-grams "
                "count tokens, so they do not belong into one table. Evaluate them one by one."
            )
        if (other.length, other.until_eot) != (first.length, first.until_eot):
            raise UserError(
                f"Samples of {first.model} have {first.length} tokens and those of {other.model} "
                f"{other.length} (or end differently): entropy grows with length. Draw both alike."
            )
    numbers = sorted({len(s) for s in sets} | ({num} if num is not None else set()))
    counted = [name for name in metrics if METRICS[name].counts]
    if counted and len(numbers) > 1:
        raise UserError(
            f"There are {numbers[0]} samples in one row and {numbers[-1]} in another, on which the "
            f"metric {counted[0]} depends: draw equally many (--num), or leave it out."
        )
