"""Sampling by certainty: of the tokens drawn for all masks, the surest are kept.

MaskGIT's rule, and that of LLaDA (confidence), Dream (entropy, margin) and Fast-dLLM (threshold).
The order of the positions depends on the draws, so this is not a sample of the denoiser's law even
if it writes one token at a time.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.sampling.categorical import draw, restrict
from didi_instruct.sampling.chain import (
    Callback,
    Canvas,
    Chain,
    Denoiser,
    Draw,
    Purpose,
    Samples,
    in_parts,
    masked_share,
)


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


ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "confidence": confidence,
    "entropy": certainty,
    "margin": margin,
}
"""What comes first: of these numbers the highest."""


@torch.no_grad()
def ordered(
    denoiser: Denoiser,
    canvas: Canvas,
    *,
    steps: int | None = None,
    order: str = "confidence",
    threshold: float | None = None,
    settings: Draw | None = None,
    callback: Callback | None = None,
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
    most = max([1, *canvas.open.sum(1).tolist()]) if steps is None else steps
    chain = Chain(denoiser, canvas, settings or Draw(), steps=most, callback=callback)
    nfe = 0
    for n in range(most):
        masked, share = chain.masked, chain.share
        if steps is None and not masked.any():
            break
        keep = masked
        if masked.any():
            token, log_p, value = candidates(chain, masked, order, n)
            place = rank(value, masked)
            if steps is None:
                keep = masked & ((value >= lowest) | (place < 1))
            else:
                left = masked.sum(1, keepdim=True)
                keep = masked & (place < -(-left // (steps - n)))
            kept = keep[masked]
            chain.put(keep, token[kept], log_p[kept])
        chain.tell(share, keep)
        nfe += 1
    return chain.samples(nfe=nfe, exact_path=False)


def candidates(chain: Chain, masked: Tensor, order: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for every mask: tokens (R,), their log-probabilities (R,), values (B, L)."""
    logits = chain.logits(masked_share(chain.z, chain.canvas.mask_id), masked)
    uniforms = chain.uniforms(Purpose.TOKEN, n)[masked]
    tokens, log_ps, values = [], [], []
    for part, numbers in in_parts(logits, uniforms):
        own = restrict(part)
        token = draw(chain.law(part), numbers)
        tokens.append(token)
        log_ps.append(own.gather(-1, token[:, None]).squeeze(-1))
        values.append(ORDERS[order](own, token))
    value = torch.zeros(masked.shape, dtype=torch.float64, device=masked.device)
    return torch.cat(tokens), torch.cat(log_ps), value.masked_scatter(masked, torch.cat(values))


def rank(value: Tensor, masked: Tensor) -> Tensor:
    """Place of each mask among those of its row, 0 for the highest; the leftmost of equals first.

    Shapes: (B, L), (B, L) -> (B, L); places of other positions come after all masks.
    """
    value = value.masked_fill(~masked, -math.inf)
    highest = value.argsort(dim=1, descending=True, stable=True)
    return highest.argsort(1)


def _lowest(steps: int | None, order: str, threshold: float | None) -> float:
    """Return the value that passes a threshold, or say what is wrong with the arguments."""
    if order not in ORDERS:
        raise UserError(f"`{order}` is not an order. Known: {', '.join(ORDERS)}.")
    if (steps is None) == (threshold is None):
        raise UserError("Sampling in order needs steps or a threshold: give one of the two.")
    if threshold is None:
        return math.nan
    if order == "entropy":
        if not threshold >= 0:
            raise UserError(f"threshold is {threshold}: an entropy is 0 or more.")
        return -threshold
    if not 0 <= threshold <= 1:
        raise UserError(f"threshold is {threshold}: a {order} is between 0 and 1.")
    return threshold
