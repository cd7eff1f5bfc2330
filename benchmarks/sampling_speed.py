"""Ancestral sampling on the CPU: a dense reference against ours, same output law.

    didi pretrain oracle-teacher --out runs/oracle
    python benchmarks/sampling_speed.py runs/oracle [--num 256] [--json FILE]

The reference is `benchmarking.naive_sampling`, which does what published code does: every step runs
the whole network on every sample and draws at every position from float64 probabilities. Both are
timed in one run, in turns, after a warm-up; medians. Law: mean exact -log p of both sample sets
under the oracle, which must agree within their standard errors.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import didi_instruct as didi
from didi_instruct.benchmarking.naive_sampling import NaiveSampler
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import network_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, State


def dense(model: didi.Model, num: int, length: int, steps: int, seed: int) -> torch.Tensor:
    """Sample naively."""
    sampler = NaiveSampler(
        denoiser=model.denoiser, schedule=model.schedule, mask_id=model.mask_symbol, steps=steps
    )
    start = torch.full((num, length), model.mask_symbol)
    return sampler(start, torch.Generator().manual_seed(seed))


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(model: didi.Model, num: int, steps: int, repeats: int) -> dict[str, float]:
    """Time both, in turns."""
    language, length = OracleLanguage.default(), model.config.length
    denoiser = network_denoiser(model.network, model.schedule)

    def ours(seed: int) -> torch.Tensor:
        canvas = Canvas.blank(num, length, model.mask_symbol)
        state = State(canvas, DrawOptions(seed=seed))
        drawn = ancestral(denoiser, model.schedule, state, steps=steps)
        passes.append(drawn.passes)
        return drawn.tokens

    passes: list[float] = []
    samples = {"dense": [dense(model, num, length, steps, 100)], "ours": [ours(100)]}
    times: dict[str, list[float]] = {"dense": [], "ours": []}
    for repeat in range(repeats):
        times["dense"].append(
            seconds(lambda r=repeat: samples["dense"].append(dense(model, num, length, steps, r)))
        )
        times["ours"].append(seconds(lambda r=repeat: samples["ours"].append(ours(r))))
    row: dict[str, float] = {"steps": steps, "num": num, "length": length}
    for name in ("dense", "ours"):
        nats = -language.log_prob(torch.cat(samples[name]))
        row[f"{name}_seconds"] = statistics.median(times[name])
        row[f"{name}_nats"] = nats.mean().item()
        row[f"{name}_nats_se"] = nats.std().item() / len(nats) ** 0.5
    row["passes"] = statistics.mean(passes)
    row["speed_up"] = row["dense_seconds"] / row["ours_seconds"]
    return row


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", default="4,16,64,256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = didi.load(arguments.model, device="cpu")
    rows = []
    print("steps  dense s   ours s  speed-up  passes   dense -log p      ours -log p")
    for steps in map(int, arguments.steps.split(",")):
        row = compare(model, arguments.num, steps, arguments.repeats)
        rows.append(row)
        if (
            abs(row["dense_nats"] - row["ours_nats"])
            > 4 * (row["dense_nats_se"] ** 2 + row["ours_nats_se"] ** 2) ** 0.5
        ):
            raise SystemExit(f"{steps} steps: the two laws differ by more than 4 standard errors")
        print(
            f"{steps:5} {row['dense_seconds']:8.3f} {row['ours_seconds']:8.3f} "
            f"{row['speed_up']:9.2f} {row['passes']:7.2f}   "
            f"{row['dense_nats']:.2f} ± {row['dense_nats_se']:.2f}   "
            f"{row['ours_nats']:.2f} ± {row['ours_nats_se']:.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
