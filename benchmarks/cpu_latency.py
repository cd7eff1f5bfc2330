"""One text on the CPU: the network as it is against what sampling makes of it, and the floor.

    OMP_NUM_THREADS=2 python benchmarks/cpu_latency.py MODEL [--steps 8] [--json FILE]

MODEL is any SOURCE without time conditioning. The floor is the bare matrix products of a pass (the
linear layers, and q k' and p v of the attention), one after the other, each with the faster of
`F.linear` and oneDNN's packed weights, nothing between them. All variants are timed in turns in one
run; the least time of many repeats, since others may share the machine, and the median beside it.
A pass has half the text written and asks for the logits that a step of a text needs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import didi_instruct as didi
from didi_instruct.models.dit import DiT
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import Denoiser, network_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.engines.cpu import PackedLinear, packed_denoiser
from didi_instruct.sampling.state import Canvas, Reads, State

Variants = dict[str, Callable[[], object]]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def in_turns(work: Variants, repeats: int) -> dict[str, dict[str, float]]:
    """Least and median milliseconds of each, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for once in work.values():
        once()
    for _ in range(repeats):
        for name, once in work.items():
            started = time.perf_counter()
            once()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {n: {"least": min(t), "median": statistics.median(t)} for n, t in times.items()}


def products(network: DiT, length: int, rows: int) -> tuple[list[Callable[[], object]], float]:
    """The matrix products of a pass, and how many additions and multiplications they are."""
    dtype = network.vocab_embed.embedding.dtype
    config, work, flops = network.config, [], 0.0

    def add(x: Tensor, weight: Tensor) -> None:
        nonlocal flops
        flops += 2.0 * x.numel() * len(weight)
        packed = PackedLinear(weight)
        choice = in_turns({"plain": lambda: F.linear(x, weight), "packed": lambda: packed(x)}, 20)
        if choice["plain"]["least"] < choice["packed"]["least"]:
            work.append(lambda: F.linear(x, weight))
        else:
            work.append(lambda: packed(x))

    width = config.hidden // config.heads
    for n, block in enumerate(network.blocks):
        last = n == config.layers - 1
        for linear in (block.attn_qkv, block.attn_out, block.mlp[0], block.mlp[2]):
            some = rows if last and linear is not block.attn_qkv else length
            add(torch.randn(some, linear.in_features, dtype=dtype), linear.weight.detach())
        q = torch.randn(config.heads, rows if last else length, width, dtype=dtype)
        k = torch.randn(config.heads, length, width, dtype=dtype)
        weights = torch.rand(config.heads, q.shape[1], length, dtype=dtype)
        work.append(lambda q=q, k=k: torch.bmm(q, k.transpose(1, 2)))
        work.append(lambda p=weights, v=k: torch.bmm(p, v))
        flops += 4.0 * q.numel() * length
    head = network.output_layer.linear.weight.detach()[: config.num_tokens]
    add(torch.randn(rows, config.hidden, dtype=dtype), head)
    return work, flops


def variants(model: didi.Model, steps: int) -> tuple[Variants, Variants, float]:
    """The passes and texts to time, of weights of one type, and the operations of a pass."""
    network, mask = model.network, model.mask_symbol
    assert isinstance(network, DiT)
    length = model.config.length
    plain, laid_out = network_denoiser(network, model.schedule), packed_denoiser(network)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(length, generator=generator)
    z = torch.randint(1, model.config.num_tokens, (1, length), generator=generator)
    z[0, order[: length // 2]] = mask
    reads, at = Reads(z), order[: length // steps].sort().values
    bare, flops = products(network, length, length // steps)
    everywhere = torch.arange(length)

    passes: Variants = {
        "network": lambda: plain.logits(reads, 0.5, at),
        "laid out, logits of all positions": lambda: laid_out.logits(reads, 0.5, everywhere),
        "laid out": lambda: laid_out.logits(reads, 0.5, at),
        "floor: bare products": lambda: [work() for work in bare],
    }

    def text(denoiser: Denoiser) -> None:
        canvas = Canvas.blank(1, length, mask)
        ancestral(denoiser, model.schedule, State(canvas, DrawOptions(seed=1)), steps=steps)

    texts: Variants = {
        "network": lambda: text(plain),
        "laid out": lambda: text(laid_out),
    }
    return passes, texts, flops


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    passes: Variants = {}
    texts: Variants = {}
    flops = 0.0
    for name, dtype in TYPES.items():
        model = didi.load(arguments.model, device="cpu", dtype=dtype)
        some, more, flops = variants(model, arguments.steps)
        passes |= {f"{name} {k}": v for k, v in some.items()}
        texts |= {f"{name} {k}": v for k, v in more.items()}
    found = {
        "pass": in_turns(passes, arguments.repeats),
        f"text of {arguments.steps} steps": in_turns(texts, arguments.repeats),
    }
    print(f"{torch.get_num_threads()} threads, {flops / 1e9:.2f} GFLOP in a pass")
    for what, rows in found.items():
        first = rows["float32 network"]["least"]
        for name, row in rows.items():
            print(
                f"{what:16} {name:36} {row['least']:8.1f} ms  median {row['median']:8.1f}  "
                f"{first / row['least']:5.2f}x"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
