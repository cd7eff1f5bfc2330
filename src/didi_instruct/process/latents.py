"""The Gaussian latent behind uniform-state diffusion (DUO): one noise, the states of all times.

w_t = alpha_tilde_t x + sigma_tilde_t eps with eps ~ N(0, I_V), and z_t = argmax w_t. No (B, L, V)
noise is ever drawn: of the V - 1 entries that are not the clean token's, only the largest ones
matter, and those can be drawn as they are.
"""

import torch
from torch import Tensor

from didi_instruct.process.masking import check_level
from didi_instruct.process.uniform import discrete_to_gaussian

TINY = 2.0**-53
"""The smallest number that a uniform draw is taken for: its logarithm has to be one."""


def state(
    x: Tensor, alpha: Tensor, num_tokens: int, uniforms: Tensor, random_others: Tensor
) -> Tensor:
    """z_t = argmax w_t at level alpha_t; with the same noise at other levels, the path of a text.

    Let the largest other entry of eps lead that of the clean token by D, and be token J. Then z_t
    is x where D < alpha_tilde_t / sigma_tilde_t, else J. J is uniform over the V - 1 other tokens
    and independent of D, and P(z_t = x) = alpha_t + (1 - alpha_t) / V at every level. So a uniform
    number in D's place, compared with that probability, gives the law of the whole path, exactly.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L) in [0, 1), random_others (B, L) in [0, V - 1)
    -> (B, L).
    """
    check_level("alpha", alpha, x)
    clean = uniforms < alpha + (1 - alpha) / num_tokens
    return torch.where(clean, x, _skip(random_others, x))


def soft_state(
    x: Tensor,
    alpha: Tensor,
    num_tokens: int,
    temperature: float,
    uniforms: Tensor,
    picks: Tensor,
) -> tuple[Tensor, Tensor]:
    """The largest entries of softmax(w_t / temperature): the clean token's and K others.

    The others are drawn as order statistics of V - 1 Gaussians, largest first, so the state
    z_t = argmax w_t is exact (the token of the largest weight), and so are the weights if
    K = V - 1; with fewer they are those of the K + 1 tokens among themselves.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L, K + 1) and picks (B, L, K) in [0, 1), float64
    -> tokens and weights (B, L, K + 1), the clean token first.
    """
    check_level("alpha", alpha, x)
    tilde = discrete_to_gaussian(alpha.double(), num_tokens)[..., None]
    sigma = ((1 - tilde) * (1 + tilde)).sqrt()
    uniforms = uniforms.clamp(TINY, 1 - TINY)
    own = tilde + sigma * torch.special.ndtri(uniforms[..., :1])
    others = sigma * _largest(uniforms[..., 1:], num_tokens - 1)
    weights = (torch.cat([own, others], -1) / temperature).softmax(-1)
    chosen = _distinct(picks, num_tokens - 1)
    return torch.cat([x[..., None], _skip(chosen, x[..., None])], -1), weights


def _largest(uniforms: Tensor, count: int) -> Tensor:
    """The K largest of `count` independent Gaussians, falling: uniforms (..., K) -> (..., K).

    The largest of n uniform numbers is u^(1 / n), and the rest are uniform below it.
    """
    left = count - torch.arange(uniforms.shape[-1], device=uniforms.device)
    log_rank = (uniforms.log() / left).cumsum(-1)
    return -torch.special.ndtri((-log_rank.expm1()).clamp(TINY, 1 - TINY))


def _distinct(picks: Tensor, count: int) -> Tensor:
    """K different numbers below `count`, in random order: picks (..., K) in [0, 1) -> (..., K).

    The k-th is the n-th of the numbers that are left, counted past those taken, in rising order.
    """
    left = count - torch.arange(picks.shape[-1], device=picks.device)
    places = (picks * left).int().minimum(left.int() - 1)
    chosen: list[Tensor] = []
    taken: list[Tensor] = []  # the same numbers, rising
    for number in places.movedim(-1, 0).contiguous():
        for other in taken:
            number = number + (number >= other)
        chosen.append(number)
        for rank, other in enumerate(taken):
            taken[rank], number = other.minimum(number), other.maximum(number)
        taken.append(number)
    return torch.stack(chosen, -1).long()


def _skip(number: Tensor, x: Tensor) -> Tensor:
    """Numbers below V - 1 as tokens other than x."""
    return number + (number >= x)


def level_of_gamma(gamma: Tensor) -> Tensor:
    """alpha_tilde at a log noise-to-signal ratio gamma = log(sigma_tilde^2 / alpha_tilde^2)."""
    return torch.sigmoid(-gamma).sqrt()
