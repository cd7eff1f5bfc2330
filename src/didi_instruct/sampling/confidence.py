"""Sampling by certainty: of the tokens drawn for all masks, the surest are kept.

MaskGIT's rule, and that of LLaDA (confidence), Dream (entropy, margin) and Fast-dLLM (threshold).
The order of the positions depends on the draws, so this is not a sample of the denoiser's law even
if it writes one token at a time.
"""

import math

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.sampling.denoiser import Denoiser
from didi_instruct.sampling.draw import in_parts, invert, law_of
from didi_instruct.sampling.plan import Step, check_steps, step_where
from didi_instruct.sampling.state import Samples, State


def confidence(log_p: Tensor, token: Tensor) -> Tensor:
    """Probability of the token: (R, V), (R,) -> (R,)."""
    return log_p.gather(-1, token[:, None]).squeeze(-1).exp()


def certainty(log_p: Tensor, token: Tensor) -> Tensor:
    """Negative entropy of the law, whatever the token: (R, V), (R,) -> (R,)."""
    return -torch.special.entr(log_p.exp()).sum(-1)


def margin(log_p: Tensor, token: Tensor) -> Tensor:
    """Lead of the most probable token over the second, whatever the token: (R, V), (R,) -> (R,)."""
    best = log_p.exp().topk(2, -1).values
    return best[:, 0] - best[:, 1]


ORDERS = {"confidence": confidence, "entropy": certainty, "margin": margin}
"""Sureness of drawn tokens: the highest come first."""


@torch.no_grad()
def by_confidence(
    denoiser: Denoiser,
    state: State,
    *,
    steps: int | None = None,
    order: str = "confidence",
    threshold: float | None = None,
) -> Samples:
    """Draw a token for every mask at each step, and keep those that come first in `order`.

    `confidence` is the probability of the drawn token (high first), `entropy` that of the law (low
    first), `margin` the lead of the most probable token (high first). They are taken from the
    denoiser's own law, before temperature, top-p and top-k, which change what is drawn but not what
    is sure: greedy draws would all be equally sure. Among equals the leftmost comes first.

    Give one of the two: `steps` spreads the masks of each sample evenly over so many steps, the
    larger shares first; `threshold` keeps all that reach it (an entropy: that stay below it), at
    least the first, until nothing is masked, and `nfe` is the number of steps of the slowest.

    There is no schedule: the denoiser is told the share of the text that is masked.
    """
    lowest = _lowest(steps, order, threshold)
    state.steps = max([1, *state.open.sum(1).tolist()]) if steps is None else steps
    nfe = keep_surest(denoiser, state, state.open, order, state.steps, lowest)
    return state.samples(nfe, exact_path=False)


def keep_surest(
    denoiser: Denoiser,
    state: State,
    inside: Tensor,
    order: str,
    steps: int,
    lowest: float | None = None,
) -> int:
    """Write the positions `inside` (B, L) in order of sureness; return the number of steps.

    Those are `steps`, or as few as it takes to keep all that reach `lowest`.
    """
    count = inside.sum()
    for n in range(steps):
        masked = state.masked & inside
        share = float(masked.sum() / count.clamp(min=1))
        if masked.any():
            step = step_where(state, n, share, masked)
            token, log_p, sureness = _candidates(denoiser, state, step, order)
            value = torch.zeros_like(state.costs).masked_scatter(masked, sureness)
            place = rank(value, masked)
            if lowest is None:
                keep = place < -(-masked.sum(1, keepdim=True) // (steps - n))
            else:
                keep = (value >= lowest) | (place < 1)
            kept = keep.view(-1)[step.writes]
            state.write(step.writes[kept], token[kept], log_p[kept])
        elif lowest is not None:
            return n
        state.report(share)
    return steps


def _candidates(
    denoiser: Denoiser, state: State, step: Step, order: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities and sureness (N,) of what a step would write."""
    settings, times = state.settings, state.reads(step.states).masked_share(state.mask_id)
    reads = state.reads(step.states, step.codes)
    state.count(len(reads))
    logits = denoiser.logits(reads, times, step.reads)
    logits = logits if step.row is None else logits[step.row]
    tokens, log_ps, values = [], [], []
    for part, numbers in in_parts(logits, step.u):
        own = law_of(part)
        token = invert(law_of(part, settings) if settings.restricted else own, numbers)
        tokens.append(token)
        log_ps.append(own.gather(-1, token[:, None]).squeeze(-1))
        values.append(ORDERS[order](own, token))
    return torch.cat(tokens), torch.cat(log_ps), torch.cat(values)


def rank(value: Tensor, masked: Tensor) -> Tensor:
    """Place of each mask among those of its row, 0 for the highest; the leftmost of equals first.

    Shapes: (B, L), (B, L) -> (B, L); places of other positions come after all masks.
    """
    value = value.masked_fill(~masked, -math.inf)
    highest = value.argsort(dim=1, descending=True, stable=True)
    return highest.argsort(1)


def _lowest(steps: int | None, order: str, threshold: float | None) -> float | None:
    """Return the sureness that passes a threshold, or say what is wrong with the arguments."""
    if (steps is None) == (threshold is None):
        raise UserError("Sampling in order needs steps or a threshold: give one of the two.")
    if steps is not None:
        check_steps(steps)
    if threshold is None:
        return None
    if order == "entropy":
        if not threshold >= 0:
            raise UserError(f"threshold is {threshold}: an entropy is 0 or more.")
        return -threshold
    if not 0 <= threshold <= 1:
        raise UserError(f"threshold is {threshold}: a {order} is between 0 and 1.")
    return threshold
