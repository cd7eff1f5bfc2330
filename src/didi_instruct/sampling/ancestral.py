"""Ancestral sampling of a masked diffusion model: Algorithm 2 without guidance."""

import torch

from didi_instruct.process.masking import reveal_probability
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Callback, Canvas, Chain, Denoiser, Draw, Purpose, Samples
from didi_instruct.sampling.grids import Grid, time_grid


@torch.no_grad()
def ancestral(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    settings: Draw | None = None,
    grid: Grid = "uniform",
    greedy_tail: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Go from all masks to none in `steps` steps, Eq. (2) with x drawn from p(x | z).

    A masked position is revealed on the way from t to s with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from the denoiser. Which ones are revealed
    does not depend on the tokens, so the coins are thrown first: the output layer runs on those
    rows alone, and a sample of which a step reveals nothing needs no forward pass.

    `greedy_tail`: the last step takes the most probable tokens instead of drawing them.
    """
    chain = Chain(denoiser, canvas, settings or Draw(), steps=steps, callback=callback)
    chances = reveal_chances(schedule, times := time_grid(grid, steps))
    for n, chance in enumerate(chances):
        reveal = chain.masked & (chain.uniforms(Purpose.REVEAL, n) < chance)
        if reveal.any():
            logits = chain.logits(times[n], reveal)
            greedy = greedy_tail and n == steps - 1
            chain.write(reveal, logits, Purpose.TOKEN, n, greedy=greedy)
        chain.tell(times[n], reveal)
    return chain.samples(nfe=steps)


def reveal_chances(schedule: Schedule, times: list[float]) -> list[float]:
    """Probability that a mask is revealed by each step of a grid; 1 for the last."""
    alphas = schedule.alpha(torch.tensor(times, dtype=torch.float64))
    chances: list[float] = reveal_probability(alphas[1:], alphas[:-1]).tolist()
    return [*chances[:-1], 1.0]
