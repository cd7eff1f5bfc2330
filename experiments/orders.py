"""Which order of revealing suits a text best? Forward path nats of a teacher, and a search.

    python experiments/orders.py TEACHER DATA --steps 4,8,16 --moves 300 --out orders.json

With N steps, the nats that a teacher pays for true texts when step after step is revealed in some
order: what independence within steps costs, and what the teacher's own errors cost in the contexts
that the order leads to. Orders: by chance; by the golden ratio (low discrepancy); by bisection; and
plans, which give each of 2N positions in a row its step, such as `masking.interleaved_plan`. From
that plan a search goes on: it moves a position to another step, or swaps two, and keeps what is
better. Plans are compared on the same texts and know no chance; the best is checked on other texts.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from didi_instruct.data.dataset import open_data
from didi_instruct.model import Model, load
from didi_instruct.process.masking import before_end, interleaved_plan

GOLDEN = (5**0.5 - 1) / 2
ROWS = 256
"""Texts in a pass."""


@torch.no_grad()
def path_nats(model: Model, rows: Tensor, turn: Tensor, steps: int) -> tuple[float, list[float]]:
    """Nats per text, all and by step, when position (b, l) is revealed at step turn[b, l]."""
    config, network = model.config, model.network
    assert config.mask_id is not None
    text = torch.ones_like(rows, dtype=torch.bool)
    if config.end_id is not None:
        text = before_end(rows, config.end_id)
    each = torch.zeros(steps, dtype=torch.float64, device=rows.device)
    for part in torch.arange(len(rows), device=rows.device).split(ROWS):
        x, when, own = rows[part], turn[part], text[part]
        for step in range(steps):
            z = x.masked_fill((when >= step) & own, config.mask_id)
            shown = (when == step) & own
            cuda = rows.device.type == "cuda"
            with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=cuda):
                mods = network.modulations()
                hidden = network.trunk(network.embed(z), mods)[shown]
                logits = network.head(hidden, mods)
            log_p = logits.float().log_softmax(-1).gather(-1, x[shown][:, None])
            each[step] -= log_p.double().sum()
    each /= len(rows)
    return float(each.sum()), [round(nats, 2) for nats in each.tolist()]


def turns_of(order: str, rows: Tensor, steps: int, seed: int) -> Tensor:
    """Steps of all positions in an order by name; shares of the steps are equal."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    place = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
    shift = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64, device=rows.device)
    if order == "random":
        number = torch.rand(
            rows.shape, generator=generator, dtype=torch.float64, device=rows.device
        )
    elif order == "golden":
        number = (place * GOLDEN + shift) % 1
    else:
        digits = (rows.shape[1] - 1).bit_length()
        count = (place.long() + (shift * 2**digits).long()) % 2**digits
        number = sum((count >> k & 1).double() * 0.5 ** (k + 1) for k in range(digits))
    return (number * steps).long().clamp(max=steps - 1)


def laid_out(plan: tuple[int, ...], rows: Tensor) -> Tensor:
    """Steps of all positions by a plan that begins anew."""
    table = torch.tensor(plan, device=rows.device)
    return table[torch.arange(rows.shape[1], device=rows.device) % len(plan)].expand(rows.shape)


def neighbour(plan: tuple[int, ...], steps: int, chance: random.Random) -> tuple[int, ...]:
    """A plan that differs in one position, or in two that were swapped; no step is left out."""
    while True:
        new = list(plan)
        a, b = chance.sample(range(len(plan)), 2)
        if chance.random() < 0.5:
            new[a], new[b] = new[b], new[a]
        else:
            new[a] = chance.randrange(steps)
        if tuple(new) != plan and set(new) == set(range(steps)):
            return tuple(new)


def search(
    nats: Callable[[tuple[int, ...]], float], steps: int, moves: int, seed: int
) -> tuple[tuple[int, ...], float]:
    """Descend from `streams` by single moves."""
    chance, plan = random.Random(seed), interleaved_plan(steps)
    best, begun = nats(plan), time.time()
    for move in range(moves):
        other = neighbour(plan, steps, chance)
        value = nats(other)
        if value < best:
            plan, best = other, value
            print(f"  {move}: {best:.2f} {plan} {time.time() - begun:.0f} s", flush=True)
    return plan, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("--steps", default="4,8,16")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--moves", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(args.teacher)
    rows = open_data(args.data, "train").ordered(0, args.rows).to(model.device)
    held_out = open_data(args.data, "valid").ordered(0, args.rows).to(model.device)
    found = []
    for steps in map(int, args.steps.split(",")):
        for order in ("random", "golden", "bisection"):
            nats, each = path_nats(
                model, held_out, turns_of(order, held_out, steps, args.seed), steps
            )
            found.append({"steps": steps, "order": order, "nats": nats, "by_step": each})
            print(steps, order, round(nats, 2), each, flush=True)
        plans = {"streams": interleaved_plan(steps)}
        if args.moves:
            plans["searched"], _ = search(
                lambda plan, n=steps: path_nats(model, rows, laid_out(plan, rows), n)[0],
                steps,
                args.moves,
                args.seed,
            )
        for name, plan in plans.items():
            nats, each = path_nats(model, held_out, laid_out(plan, held_out), steps)
            found.append(
                {"steps": steps, "order": name, "nats": nats, "by_step": each, "plan": plan}
            )
            print(steps, name, round(nats, 2), each, plan, flush=True)
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
