"""Ancestral sampling of a masked diffusion model: Algorithm 2 without guidance."""

import torch

from didi_instruct.config.model import Order
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Callback, Canvas, Chain, Denoiser, Draw, Purpose, Samples
from didi_instruct.sampling.grids import Grid
from didi_instruct.sampling.planned import can_plan, planned
from didi_instruct.sampling.reveals import Reveals
from didi_instruct.sampling.walks import walk


@torch.no_grad()
def ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    settings: Draw | None = None,
    grid: Grid | None = None,
    order: Order = "random",
    greedy_tail: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Go from all masks to none in `steps` steps, Eq. (2) with x drawn from p(x | z).

    A masked position is revealed on the way from t to s with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from the denoiser. Which ones are revealed
    does not depend on the tokens, so the coins are thrown first: the output layer runs on those
    rows alone, and a sample of which a step reveals nothing needs no forward pass. In the
    order `streams` a step reveals positions apart from each other instead.

    `greedy_tail`: the last step takes the most probable tokens instead of drawing them.
    """
    chain = Chain(denoiser, canvas, settings or Draw(), steps=steps, callback=callback)
    reveals = Reveals(chain, schedule, grid, order)
    done = None if greedy_tail else walk(denoiser, chain, reveals)
    if done is not None:
        return done
    if can_plan(denoiser, canvas):
        return planned(denoiser, chain, reveals, greedy_tail=greedy_tail)  # type: ignore[arg-type]
    for n in range(steps):
        reveal = reveals(n)
        if reveal.any():
            logits = chain.logits(reveals.times[n], reveal)
            greedy = greedy_tail and n == steps - 1
            chain.write(reveal, logits, Purpose.TOKEN, n, greedy=greedy)
        chain.tell(reveals.times[n], reveal)
    return chain.samples(nfe=steps)
