"""The masked process: q(z_t | x), its exact posterior, orders and lengths of texts.

V real tokens, and one mask whose id may be any id that no clean text contains. Where a vector runs
over all states of a position, the mask is its last entry. alpha is (B, 1), one level per sequence,
or anything else that broadcasts against (B, L).
"""

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.model import NEVER
from didi_instruct.process.schedule import Schedule
from didi_instruct.transfer import sent


def mask(x: Tensor, alpha: Tensor, mask_id: int, uniforms: Tensor) -> Tensor:
    """Draw z_t ~ q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) m), Eq. (1).

    A token stays where its uniform is below alpha_t, so the same uniforms at a lower alpha mask the
    same positions and more.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L) in [0, 1) -> (B, L).
    """
    return torch.where(uniforms < alpha, x, mask_id)


def with_code(z: Tensor, mask_id: int, code: Tensor | int) -> Tensor:
    """Texts whose masks carry a code: z (B, L), code (B,) or one for all -> (B, L)."""
    which = code[:, None] if isinstance(code, Tensor) else code
    return torch.where(z == mask_id, z + which, z)


def reveal_probability(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """Return (alpha_s - alpha_t) / (1 - alpha_t): a mask at t is revealed by the earlier s.

    At alpha_t = 1 nothing is masked and the quotient is 0 / 0; the answer there is 1, its value for
    s = 0.
    """
    reveal = (alpha_s - alpha_t) / (1 - alpha_t)
    return torch.where(alpha_t < 1, reveal, torch.ones_like(reveal))


def revealed_shares(schedule: Schedule, times: Tensor) -> Tensor:
    """Share of the masks of time 1 that is revealed by each time; 1 at time 0."""
    alpha = schedule.alpha(times)
    share = reveal_probability(alpha, schedule.alpha(torch.ones_like(times)))
    return torch.where(times <= 0, torch.ones_like(share), share)


def posterior(z_t: Tensor, p_x: Tensor, alpha_s: Tensor, alpha_t: Tensor, mask_id: int) -> Tensor:
    """Probabilities of z_s given z_t and a guess p_x of the clean text, s < t.

    Eq. (2): a visible token stays; a masked one is revealed with probability
    (alpha_s - alpha_t) / (1 - alpha_t), and then drawn from p_x, else it stays masked.

    Shapes: z_t (B, L), p_x (B, L, V), alpha_s and alpha_t (B, 1) -> (B, L, V + 1), mask last.
    """
    masked = z_t == mask_id
    reveal = reveal_probability(alpha_s, alpha_t).to(p_x.dtype) * masked
    state = torch.where(masked, p_x.shape[-1], z_t)
    probabilities = F.pad(reveal[..., None] * p_x, (0, 1))
    return probabilities.scatter_add_(-1, state[..., None], 1 - reveal[..., None])


def stratified_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw times for a batch: one uniform draw in each of `count` equal strata, in random order.

    Each time alone is uniform on (0, 1), and their mean estimates an integral over t with less
    variance than independent draws do. The random order keeps a time from following the row of the
    batch.

    Returns (count,) float32 in (0, 1): neither t nor 1 - t rounds to 0 or 1.
    """
    device = generator.device
    offsets = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
    order = torch.randperm(count, generator=generator, device=device)
    margin = 2.0**-24  # 1 - 2^-24 is the largest float32 below 1
    return ((order + offsets) / count).clamp(margin, 1 - margin).float()


@functools.cache
def interleaved_plan(steps: int) -> tuple[int, ...]:
    """Period of the order `streams`: the steps that reveal consecutive positions.

    The heads of two streams come first, then both grow to the right, so that no two neighbours are
    revealed in one step (from 3 steps on).
    """
    if steps < 4:
        return ((0,), (0, 1, 1, 1), (0, 2, 1, 2))[steps - 1]
    stream = [2 + k for k in range(steps - 4)] + [steps - 1, steps - 2, steps - 1]
    return (0, *stream, 1, *stream)


def interleaved_turns(open: Tensor, steps: int) -> Tensor:
    """The step that reveals each position in `streams`, counting open ones: (B, L) -> (B, L)."""
    plan = sent(torch.tensor(interleaved_plan(steps)), open.device)
    return plan[(open.cumsum(1) - 1).clamp(min=0) % len(plan)]


@functools.cache
def interleaved_shares(steps: int) -> tuple[float, ...]:
    """Share of a period that `streams` has revealed after 0, 1, ..., `steps` steps."""
    plan = interleaved_plan(steps)
    return tuple(sum(turn < n for turn in plan) / len(plan) for n in range(steps + 1))


def interleaved_times(schedule: Schedule, steps: int) -> list[float]:
    """Times from 1 to 0 at which the schedule masks as much as the steps of `streams` leave."""
    left = 1 - torch.tensor(interleaved_shares(steps), dtype=torch.float64)
    times: list[float] = schedule.time(1 - left * (1 - schedule.eps)).tolist()
    return [1.0, *times[1:-1], 0.0]


def interleaved_numbers(open: Tensor, steps: Tensor, known: Iterable[int]) -> Tensor:
    """Numbers in [0, 1) by which `streams` orders positions: open (B, L) -> (B, L).

    A position is revealed when the revealed share exceeds its number, which lies in the middle of
    its step's shares, away from rounding. `steps` (B,) has the steps of each text's path, all of
    them among `known`.
    """
    found = torch.zeros(open.shape, dtype=torch.float64, device=open.device)
    for count in known:
        edges = torch.tensor(interleaved_shares(count), dtype=torch.float64, device=open.device)
        middle = (edges[:-1] + edges[1:]) / 2
        on_path = (steps == count)[:, None]
        found = torch.where(on_path, middle[interleaved_turns(open, count)], found)
    return found


def before_end(tokens: Tensor, end_id: int) -> Tensor:
    """Positions before the first end of each text, all where there is none: (B, L) -> (B, L)."""
    return (tokens == end_id).cumsum(1) == 0


def written(tokens: Tensor, end_id: int | None, given: Sequence[int]) -> Tensor:
    """Positions that a model writes: before the end of a text, other than of `given` ids.

    Shapes: tokens (B, L) -> (B, L), bool.
    """
    found = tokens >= 0 if end_id is None else before_end(tokens, end_id)
    if not given:
        return found
    known = sent(torch.tensor(given, dtype=tokens.dtype), tokens.device)
    return found & ~torch.isin(tokens, known)


def goes_on(tokens: Tensor, end_id: int) -> bool:
    """True if something other than ends follows an end: a row holds more than one text."""
    return bool((~before_end(tokens, end_id) & (tokens != end_id)).any())


def window(length: int, mask_id: int, end_id: int, count: Tensor) -> Tensor:
    """Windows with masks for texts of `count` (B,) tokens, and ends behind: (B, L)."""
    positions = torch.arange(length, device=count.device)
    return torch.where(positions < count[:, None], mask_id, end_id)


class LengthLaw:
    """The law of the lengths of texts, from how many had each length."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Take the number of texts of 0, 1, 2, ... tokens, or NEVER; none is empty.

        One text is added at every other length, so that it is possible.
        """
        given = torch.tensor(counts, dtype=torch.float64)
        weights = torch.where(given == NEVER, 0.0, given + 1)
        weights[0] = 0
        self._p = weights / weights.sum()

    def allows(self, count: Tensor) -> Tensor:
        """True where a length may be drawn: (B,) -> (B,)."""
        return self._p.to(count.device)[count] > 0

    def log_prob(self, count: Tensor, shortest: int = 1) -> Tensor:
        """Log-probability of lengths (B,), given that none is below `shortest`: float64."""
        p = self._p_from(shortest)
        return (p / p.sum()).log().to(count.device)[count]

    def draw(self, uniforms: Tensor, shortest: int = 1) -> Tensor:
        """Draw lengths, none below `shortest`: uniforms (B,) in [0, 1) -> (B,)."""
        total = self._p_from(shortest).cumsum(0).to(uniforms.device)
        return torch.searchsorted(total, uniforms * total[-1], right=True)

    def _p_from(self, shortest: int) -> Tensor:
        return torch.where(torch.arange(len(self._p)) >= shortest, self._p, 0.0)
