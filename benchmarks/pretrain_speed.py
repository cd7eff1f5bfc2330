"""Pretraining speed of `small` at 32 x 1024: tokens/s, MFU, and where the time goes.

    python benchmarks/pretrain_speed.py [--json FILE]        # on a GPU

MFU is told against the bf16 matmul rate measured in the same run. Every part is timed with CUDA
events after warm-up; medians.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from didi_instruct.config.train import ModelRecipe, PretrainConfig, TrainConfig
from didi_instruct.models.dit import DiT, flops_per_token
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask, matmul_rate


class RandomSource:
    """Endless random tokens: speed does not depend on what they say."""

    num_sequences, tokenizer = None, None

    def __init__(self, num_tokens: int, length: int) -> None:
        self.num_tokens, self.length = num_tokens, length

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Rows, a function of the position."""
        generator = torch.Generator().manual_seed(start)
        return torch.randint(self.num_tokens, (count, self.length), generator=generator)

    ordered = rows


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of one call on the GPU."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(
    compile_mode: str, batch: int, length: int, arch: str, repeats: int
) -> dict[str, float]:
    """Time whole steps, then the parts of a step."""
    world = World(torch.device("cuda", 0))
    config = PretrainConfig(
        model=ModelRecipe(arch=arch, length=length),
        train=TrainConfig(batch_size=batch, steps=10_000, compile=compile_mode),
    )
    model_config = config.model.resolve(50257)
    task = PretrainTask(config, model_config, RandomSource(50257, length), world)
    counter = iter(range(10_000))
    for _ in range(8):
        task.step(next(counter))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step = milliseconds(lambda: [task.step(next(counter)) for _ in range(5)], repeats) / 5
    peak = torch.cuda.max_memory_allocated() / 2**30

    noise = task.objective.draw(batch, torch.Generator().manual_seed(0))
    one = task._batch(task.objective, 0, slice(0, batch), noise)

    def trunk() -> None:
        def states(network: DiT) -> torch.Tensor:
            return network.trunk(network.embed(one["z"]), network.modulations(one["sigma"]))

        with torch.no_grad():
            task.replica.run(states)

    def forward() -> None:
        with torch.no_grad():
            task.losses(one)

    def both() -> None:
        task.replica.backward(task.losses(one).mean())

    trunk(), forward(), both()
    rate = batch * length / step * 1e3
    flops = 3 * flops_per_token(model_config, task.objective.head_fraction)
    return {
        "compile": compile_mode,
        "ms_per_step": step,
        "tokens_per_second": rate,
        "tflops": rate * flops / 1e12,
        "matmul_tflops": matmul_rate(world.device) / 1e12,
        "mfu": rate * flops / matmul_rate(world.device),
        "ms_trunk_forward": milliseconds(trunk, repeats),
        "ms_forward": milliseconds(forward, repeats),
        "ms_forward_backward": milliseconds(both, repeats),
        "ms_update": milliseconds(lambda: task.replica.update(next(counter)), repeats),
        "peak_memory_gib": peak,
    }


def main() -> None:
    """Measure eager and compiled; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rows = [measure(mode, a.batch, a.length, a.arch, a.repeats) for mode in ("off", "on")]
    for name in rows[0]:
        values = [f"{r[name]:.3f}" if isinstance(r[name], float) else r[name] for r in rows]
        print(f"{name:22}" + "".join(f"{v:>14}" for v in values))
    if a.json:
        report = {"device": torch.cuda.get_device_name(), "rows": rows}
        a.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
