"""The table of docs/results.md from what `experiments/stories.sh` left behind.

    python experiments/stories_table.py runs/stories

Means over seeds (perplexity: geometric). Intervals are of the samples, not of the seeds: every
sample of a row stands beside the same one of the others, so samples are resampled for all rows at
once.
"""

import argparse
import math
import re
from pathlib import Path

import numpy as np
from stories_rows import Key, Measured, read

RESAMPLES, MANY, SEED = 2000, 256, 0
TEACHER = "teacher"


def _closed(few: np.ndarray, own: np.ndarray, many: np.ndarray) -> tuple[float, float, float]:
    """Share of the teacher's loss from few steps that is won back, with its 95% interval."""
    index = np.random.default_rng(SEED).integers(0, len(own), (RESAMPLES, len(own)))
    a, b, c = (x[index].mean(1) for x in (few, own, many))
    low, high = np.quantile((a - b) / (a - c), [0.025, 0.975])
    return (few.mean() - own.mean()) / (few.mean() - many.mean()), low, high


def _line(key: Key, measured: Measured, found: dict[Key, Measured]) -> str:
    ppl = measured.perplexity
    seeds = ", ".join(sorted(m for n in measured.rows for m in re.findall(r"-(\d+)$", n))) or "-"
    own, kl, closed = measured.gap, "", ""
    if own is not None:
        kl = f"{own.mean():.1f} ± {1.96 * own.std(ddof=1) / math.sqrt(len(own)):.1f}"
        few = found.get(Key(TEACHER, "", 1.0, key.steps))
        many = found.get(Key(TEACHER, "", 1.0, MANY))
        sides = [side.gap for side in (few, many) if side is not None]
        if key.model != TEACHER and key.steps < MANY and len(sides) == 2:
            assert sides[0] is not None
            assert sides[1] is not None
            value, low, high = _closed(sides[0], own, sides[1])
            closed = f"{value:.1%} [{low:.1%}, {high:.1%}]"
    name = f"{key.model} {key.sampler}".strip()
    cells = (
        name, seeds, f"{key.temperature:g}", str(key.steps), f"{measured.mean('passes'):.0f}",
        f"{ppl:,.1f}", f"{measured.mean('entropy'):.3f}", kl, closed,
        f"{measured.mean('self_bleu'):.3f}", f"{measured.mean('unique_4gram'):.3f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Parse, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    found = read(parser.parse_args().folders)
    heads = (
        "model", "seeds", "T", "steps", "passes", "perplexity", "entropy", "path KL", "gap closed",
        "Self-BLEU", "4-grams",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---|---" + "|--:" * (len(heads) - 2) + "|")
    for key in sorted(found, key=lambda k: (k.model, k.sampler, -k.temperature, -k.steps)):
        print(_line(key, found[key], found))


if __name__ == "__main__":
    main()
