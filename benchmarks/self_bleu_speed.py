"""Self-BLEU on one core: NLTK called naively against ours, same numbers.

    pip install nltk==3.9.2
    OMP_NUM_THREADS=1 python benchmarks/self_bleu_speed.py [--num 256] [--length 256] [--json FILE]

Samples are Zipf-distributed tokens, part of them copied phrases, so that every order has matches.
NLTK counts all references anew for every hypothesis, so its time per hypothesis is constant: it is
timed on a few hypotheses against all references and scaled to all. Ours is timed whole, the median
of several runs; a second line times it alone at 1,024 samples of 1,024 tokens.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

from didi_instruct.evaluation.diversity import self_bleu

VOCAB, PHRASE = 50_257, 16


def samples(num: int, length: int, seed: int = 0) -> np.ndarray:
    """Zipf tokens (num, length); a third of the phrases come from a common stock."""
    generator = np.random.default_rng(seed)
    phrases = -(-length // PHRASE)
    fresh = generator.zipf(1.2, size=(num, phrases, PHRASE)) % VOCAB
    stock = generator.zipf(1.2, size=(200, PHRASE)) % VOCAB
    copied = stock[generator.integers(len(stock), size=(num, phrases))]
    shared = generator.random((num, phrases, 1)) < 1 / 3
    return np.where(shared, copied, fresh).reshape(num, -1)[:, :length]


def time_nltk(tokens: np.ndarray, hypotheses: int) -> tuple[float, list[float]]:
    """Seconds per hypothesis against all others, and the scores."""
    texts = tokens.tolist()
    smooth = SmoothingFunction().method1
    started = time.perf_counter()
    scores = [
        sentence_bleu(
            texts[:i] + texts[i + 1 :], texts[i], weights=(0.2,) * 5, smoothing_function=smooth
        )
        for i in range(hypotheses)
    ]
    return (time.perf_counter() - started) / hypotheses, scores


def time_ours(tokens: np.ndarray, repeats: int) -> tuple[float, np.ndarray]:
    """Median seconds for all samples, and the scores."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        values = self_bleu(tokens).values
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hypotheses", type=int, default=8, help="samples that NLTK scores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    torch.set_num_threads(1)

    tokens = samples(args.num, args.length)
    each, expected = time_nltk(tokens, args.hypotheses)
    ours, values = time_ours(tokens, args.repeats)
    large, _ = time_ours(samples(1024, 1024), 1)
    result = {
        "num": args.num,
        "length": args.length,
        "nltk_hypotheses_timed": args.hypotheses,
        "nltk_s_scaled": each * args.num,
        "ours_s": ours,
        "ratio": each * args.num / ours,
        "max_difference": float(np.abs(values[: args.hypotheses] - expected).max()),
        "self_bleu": float(values.mean()),
        "ours_1024x1024_s": large,
    }
    print(
        f"{args.num} x {args.length}: NLTK {each * args.num:.1f} s (scaled from "
        f"{args.hypotheses} of {args.num} hypotheses), ours {ours:.4f} s: {result['ratio']:.0f}x; "
        f"largest difference {result['max_difference']:.1e}, Self-BLEU {values.mean():.3f}"
    )
    print(f"1024 x 1024: ours {large:.2f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
