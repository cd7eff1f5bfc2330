"""Time grids: at which times a sampler with N steps stops."""

import itertools
import math
from collections.abc import Sequence

from didi_instruct.errors import UserError

Grid = str | Sequence[float]
"""`uniform`, `cosine`, or N + 1 falling times from 1 to 0."""


def time_grid(grid: Grid, steps: int) -> list[float]:
    """N + 1 times from 1 to 0.

    `cosine` takes short steps first, while little is known, and long ones at the end:
    t_n = cos(pi/2 * n / N).
    """
    if steps < 1:
        raise UserError(f"steps is {steps}: use 1 or more.")
    if not isinstance(grid, str):
        times = [float(t) for t in grid]
        falling = all(a > b for a, b in itertools.pairwise(times))
        if len(times) != steps + 1 or (times[0], times[-1]) != (1.0, 0.0) or not falling:
            raise UserError(
                f"A time grid of {steps} steps is {steps + 1} times falling from 1 to 0."
            )
        return times
    if grid == "uniform":
        return [1 - n / steps for n in range(steps)] + [0.0]
    if grid == "cosine":
        return [math.cos(math.pi / 2 * n / steps) for n in range(steps)] + [0.0]
    raise UserError(f"`{grid}` is not a time grid. Known: uniform, cosine, or a list of times.")
