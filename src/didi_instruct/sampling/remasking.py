"""Ancestral sampling that takes words back: ReMDM (Wang et al. 2025).

A written token can be masked again, to be drawn anew when more of the text is known. As many more
masks are revealed, so that the noise level at every time is that of ancestral sampling.
"""

from dataclasses import replace

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Callback, Canvas, Chain, Denoiser, Draw, Purpose, Samples
from didi_instruct.sampling.grids import Grid, time_grid
from didi_instruct.sampling.reveals import reveal_chances

STRATEGIES = ("cap", "rescale")


@torch.no_grad()
def remasking(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    steps: int,
    eta: float,
    strategy: str = "cap",
    settings: Draw | None = None,
    grid: Grid = "uniform",
    greedy_tail: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Go from all masks to none in `steps` steps, masking some of what was written on the way.

    From t to s a written token (never a given one) is masked with probability sigma_t, and a mask
    revealed with probability (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t), see
    `remask_chances`. Both are decided on z_t, which is also what the denoiser sees. The last step
    reveals everything and masks nothing.

    With eta = 0 it is `ancestral`, bit for bit. Otherwise a text can be reached along many paths,
    and `log_prob` is None.
    """
    settings = settings or Draw()
    settings = replace(settings, measure_path=settings.measure_path and eta == 0)
    chain = Chain(denoiser, canvas, settings, steps=steps, callback=callback)
    times = time_grid(grid, steps)
    for n, (reveal_chance, remask_chance) in enumerate(
        remask_chances(schedule, times, eta, strategy)
    ):
        masked = chain.masked
        reveal = masked & (chain.uniforms(Purpose.REVEAL, n) < reveal_chance)
        written = chain.open & ~masked
        remask = written & (chain.uniforms(Purpose.REMASK, n) < remask_chance)
        if reveal.any():
            logits = chain.logits(times[n], reveal)
            greedy = greedy_tail and n == steps - 1
            chain.write(reveal, logits, Purpose.TOKEN, n, greedy=greedy)
        chain.erase(remask)
        chain.tell(times[n], reveal)
    return chain.samples(nfe=steps, exact_path=eta == 0)


def remask_chances(
    schedule: Schedule, times: list[float], eta: float, strategy: str
) -> list[tuple[float, float]]:
    """For each step the probabilities that a mask is revealed and that a token is masked.

    A token that is visible with probability alpha_t at t stays so with 1 - sigma, a mask becomes
    visible with r, and alpha_t (1 - sigma) + (1 - alpha_t) r = alpha_s asks for

        r = (alpha_s - alpha_t) / (1 - alpha_t) + sigma alpha_t / (1 - alpha_t),

    ancestral sampling's and as much as sigma takes away. r <= 1 asks for sigma <= sigma_max =
    min(1, (1 - alpha_s) / alpha_t), which is 0 in the last step. `cap`: sigma = min(eta,
    sigma_max); `rescale`: sigma = eta sigma_max.

    The chain starts from masks alone also where alpha_1 = eps > 0. What is visible at t is then
    (alpha_t - eps) / (1 - eps), and that takes the place of alpha, which it is if eps = 0.
    """
    if strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise UserError(f"`{strategy}` is not a re-masking strategy. Known: {known}.")
    if not 0 <= eta <= 1:
        raise UserError(f"eta is {eta}: use 0 (no re-masking) to 1.")
    masked = 1 - schedule.alpha(torch.tensor(times, dtype=torch.float64))
    visible = 1 - masked / masked[0]
    visible_s, visible_t = visible[1:], visible[:-1]
    most = ((1 - visible_s) / visible_t).clamp(max=1)  # infinite at t = 1, where nothing is visible
    sigma = most.clamp(max=eta) if strategy == "cap" else eta * most
    sigma[-1] = 0.0  # not a rounding error
    extra = sigma * visible_t / (1 - visible_t)
    reveal: Tensor = torch.tensor(reveal_chances(schedule, times), dtype=torch.float64) + extra
    return list(zip(reveal.tolist(), sigma.tolist(), strict=True))
