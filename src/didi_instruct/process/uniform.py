"""Uniform-state diffusion (DUO, Sahoo et al. 2025): noise replaces a token by a uniform one.

No state is a mask: z_t is a text of real tokens, and which of them are noise has to be guessed.
alpha is (B, 1), one level per sequence, or anything else that broadcasts against (B, L).

What a denoiser has to predict here is x^l given the *other* positions of z_t and t,
p(x^l | z_t^{-l}): the posterior and the NELBO below bring in z_t^l themselves, by Bayes' rule. With
p(x^l | z_t), which has seen z_t^l, the noisy token would be counted twice.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25  # logits that `nelbo_integrand` takes at a time: 128 MiB in float32
QUADRATURE_NODES, QUADRATURE_LIMIT = 601, 12.0
TABLE_SIZE, SHIFT_LIMIT = 1025, 16.0  # beyond this shift alpha is 1 in float64, if V < 10^9
NEWTON_STEPS = 4
TINY = 2.0**-53  # distance of uniform numbers from 0 and 1, whose logarithm or quantile is infinite


def corrupt(x: Tensor, alpha: Tensor, uniforms: Tensor, random_tokens: Tensor) -> Tensor:
    """Draw z_t ~ q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) / V).

    A token stays where its uniform is below alpha_t; else it is replaced by a random one, which may
    be the clean one too.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L) in [0, 1), random_tokens (B, L) in [0, V)
    -> (B, L).
    """
    return torch.where(uniforms < alpha, x, random_tokens)


def posterior(z_t: Tensor, p_x: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """Probabilities of z_s given z_t and a guess p_x of the clean text, s < t.

    Bayes' rule q(z_t | z_s) q(z_s | x) / q(z_t | x) with a vector p_x in place of the one-hot x and
    alpha_{t|s} = alpha_t / alpha_s:

        [V alpha_t z_t * p_x + (alpha_{t|s} - alpha_t) z_t + (alpha_s - alpha_t) p_x
         + (1 - alpha_{t|s}) (1 - alpha_s) / V] / [V alpha_t <z_t, p_x> + 1 - alpha_t]

    It is the true q(z_s^l | z_t) if p_x = p(x^l | z_t^{-l}). alpha_s must not be 0.

    Shapes: z_t (B, L), p_x (B, L, V), alpha_s and alpha_t (B, 1) -> (B, L, V).
    """
    num_tokens = p_x.shape[-1]
    alpha_s, alpha_t = alpha_s[..., None].to(p_x.dtype), alpha_t[..., None].to(p_x.dtype)
    alpha_ts = alpha_t / alpha_s
    token = z_t[..., None]
    stay = num_tokens * alpha_t * p_x.gather(-1, token)
    numerator = (alpha_s - alpha_t) * p_x + (1 - alpha_ts) * (1 - alpha_s) / num_tokens
    numerator = numerator.scatter_add(-1, token, stay + alpha_ts - alpha_t)
    return numerator / (stay + 1 - alpha_t)


def nelbo_integrand(
    logits: Tensor, x: Tensor, z: Tensor, alpha: Tensor, alpha_prime: Tensor
) -> Tensor:
    """Integrand over t of DUO's continuous-time NELBO, in nats for each position.

    With xbar = V alpha x + (1 - alpha), xbar_theta the same of p_theta = softmax(logits), i = z_t
    and beta = -alpha' / alpha, it is the KL rate between the true and the modelled reverse jumps:

        beta / V * [V / xbar_theta_i - V / xbar_i
                    + sum_j xbar_j / xbar_i * log(xbar_j xbar_theta_i / (xbar_i xbar_theta_j))]

    (DUO prints it with all signs turned and alpha' for -alpha'.) Its mean over t ~ U(0, 1) and
    z_t ~ q(z_t | x), summed over positions, is the NELBO if alpha_1 = 0; if alpha_1 > 0 what z_1
    tells of x is left out.

    alpha must be inside (0, 1). Gradients flow to the logits. Positions are taken in chunks which
    the backward pass recomputes: beside the logits only their gradient is (B, L, V), and there are
    two of it while the chunks are joined. Without chunks there would be five such tensors.

    Shapes: logits (B, L, V), x and z (B, L), alpha and alpha_prime (B, 1) -> (B, L), in float32 if
    the logits are of half precision.
    """
    alpha, alpha_prime = alpha.expand(x.shape), alpha_prime.expand(x.shape)
    count = 1 + logits.numel() // CHUNK_ELEMENTS
    chunks = zip(
        logits.flatten(0, -2).chunk(count),
        *(values.flatten().chunk(count) for values in (x, z, alpha, alpha_prime)),
        strict=True,
    )
    integrand = [
        checkpoint(_integrand_of_rows, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return torch.cat(integrand).view(x.shape)


def _integrand_of_rows(
    logits: Tensor, x: Tensor, z: Tensor, alpha: Tensor, alpha_prime: Tensor
) -> Tensor:
    """Return the integrand for N positions as a sum of two terms that are never negative.

    xbar and xbar_theta both sum to V, so the bracket of `nelbo_integrand` is, r = xbar_i /
    xbar_theta_i,

        V / xbar_i * [KL(xbar / V || xbar_theta / V) + (r - 1 - log r)].

    xbar_j = (1 - alpha) (1 + k [j = x]) and xbar_theta_j = (1 - alpha) (1 + k p_j) with
    k = V alpha / (1 - alpha), so the KL needs only p_x, p_z and one sum over the vocabulary:

        V KL / (1 - alpha) = k log((1 + k) / (1 + k p_x)) + log(1 + k) - sum_j log(1 + k p_j).

    Shapes: logits (N, V), the others (N,) -> (N,).
    """
    num_tokens = logits.shape[-1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    alpha, alpha_prime = alpha.to(dtype), alpha_prime.to(dtype)
    k = num_tokens * alpha / (1 - alpha)
    log_p = torch.log_softmax(logits, dim=-1, dtype=dtype)
    log_p_x, log_p_z = log_p.gather(-1, torch.stack((x, z), dim=-1)).unbind(-1)
    log_sum = (k[:, None] * log_p.exp()).log1p().sum(-1)

    kl = k * _log_ratio(k, log_p_x) + k.log1p() - log_sum
    log_r = torch.where(z == x, _log_ratio(k, log_p_z), -(k * log_p_z.exp()).log1p())
    excess = log_r.expm1() - log_r
    return -alpha_prime / alpha * (kl / num_tokens + excess / (1 - alpha)) / (1 + k * (z == x))


def _log_ratio(k: Tensor, log_p: Tensor) -> Tensor:
    """Return log((1 + k) / (1 + k p)), without cancellation as p nears 1."""
    return (-k * log_p.expm1() / (1 + k * log_p.exp())).log1p()


def gaussian_to_discrete(alpha_tilde: Tensor, num_tokens: int) -> Tensor:
    """Return alpha = T(alpha_tilde): argmax turns Gaussian into uniform-state diffusion.

    w = alpha_tilde x + sigma_tilde eps with eps ~ N(0, I_V) and sigma_tilde^2 = 1 - alpha_tilde^2
    has argmax w ~ Cat(alpha x + (1 - alpha) / V) with

        alpha = V / (V - 1) * [int phi(u - alpha_tilde / sigma_tilde) Phi(u)^(V - 1) du - 1 / V].

    Any shape, float64 in [0, 1].
    """
    shift = alpha_tilde / ((1 - alpha_tilde) * (1 + alpha_tilde)).sqrt()
    return _alpha_of_shift(shift, num_tokens)


@torch.no_grad()
def discrete_to_gaussian(alpha: Tensor, num_tokens: int) -> Tensor:
    """Return alpha_tilde with T(alpha_tilde) = alpha, the inverse of `gaussian_to_discrete`.

    A table brackets the answer, and Newton's method refines it. Any shape, float64 in [0, 1].
    """
    table = _alpha_table(num_tokens).to(alpha.device)
    cell = torch.searchsorted(table, alpha.contiguous(), right=True).clamp(1, TABLE_SIZE - 1)
    width = SHIFT_LIMIT / (TABLE_SIZE - 1)
    low, high = (cell - 1) * width, cell * width
    shift = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        step = (_alpha_of_shift(shift, num_tokens) - alpha) / _alpha_slope(shift, num_tokens)
        shift = torch.minimum(torch.maximum(shift - step, low), high)
    alpha_tilde = shift / (1 + shift.square()).sqrt()
    return torch.where(alpha < 1, alpha_tilde, 1.0)


def _alpha_of_shift(shift: Tensor, num_tokens: int) -> Tensor:
    """Return alpha for shift = alpha_tilde / sigma_tilde, the clean token's lead in units of noise.

    V / (V - 1) * integral of phi(v) [Phi(v + shift)^(V - 1) - Phi(v)^(V - 1)] dv: the second term
    integrates to the 1 / V of `gaussian_to_discrete`, and alpha keeps its digits when it is small.
    """
    nodes, weights = _quadrature(shift.device)
    log_power = (num_tokens - 1) * torch.special.log_ndtr(nodes + shift[..., None])
    log_power_at_0 = (num_tokens - 1) * torch.special.log_ndtr(nodes)
    alpha = (log_power.exp() - log_power_at_0.exp()) @ weights * num_tokens / (num_tokens - 1)
    return alpha.clamp(max=1.0)  # the last bit of a sum


def _alpha_slope(shift: Tensor, num_tokens: int) -> Tensor:
    """Return d alpha / d shift: V * integral of phi(v) phi(u) Phi(u)^(V - 2) dv, u = v + shift."""
    nodes, weights = _quadrature(shift.device)
    u = nodes + shift[..., None]
    log_phi = -u.square() / 2 - math.log(2 * math.pi) / 2
    log_density = log_phi + (num_tokens - 2) * torch.special.log_ndtr(u)
    return log_density.exp() @ weights * num_tokens


def _quadrature(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the trapezoidal rule for the integral of phi(v) f(v).

    For a smooth f the error falls exponentially as the step shrinks. Phi^(V - 1) bends over a width
    of 0.2 at V = 10^5; a step of 0.04 leaves rounding errors only.
    """
    nodes = torch.linspace(
        -QUADRATURE_LIMIT, QUADRATURE_LIMIT, QUADRATURE_NODES, dtype=torch.float64, device=device
    )
    step = 2 * QUADRATURE_LIMIT / (QUADRATURE_NODES - 1)
    return nodes, step * torch.exp(-nodes.square() / 2) / math.sqrt(2 * math.pi)


@cache
def _alpha_table(num_tokens: int) -> Tensor:
    """Return alpha at TABLE_SIZE equally spaced shifts from 0 to SHIFT_LIMIT."""
    shifts = torch.linspace(0, SHIFT_LIMIT, TABLE_SIZE, dtype=torch.float64)
    # Rounding may break the order where alpha is 1 up to the last bits; the search needs it.
    return _alpha_of_shift(shifts, num_tokens).cummax(0).values


def state(
    x: Tensor, alpha: Tensor, num_tokens: int, uniforms: Tensor, random_others: Tensor
) -> Tensor:
    """Draw z_t = argmax w_t at level alpha_t; the same noise at other levels gives a text's path.

    Let the largest other entry of eps lead that of the clean token by D, and be token J. Then z_t
    is x where D < alpha_tilde_t / sigma_tilde_t, else J. J is uniform over the V - 1 other tokens
    and independent of D, and P(z_t = x) = alpha_t + (1 - alpha_t) / V at every level. So a uniform
    number in D's place, compared with that probability, gives the law of the whole path, exactly.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L) in [0, 1), random_others (B, L) in [0, V - 1)
    -> (B, L).
    """
    clean = uniforms < alpha + (1 - alpha) / num_tokens
    return torch.where(clean, x, _skip(random_others, x))


def soft_state(
    x: Tensor, alpha: Tensor, num_tokens: int, temperature: float, uniforms: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw the largest entries of softmax(w_t / temperature): the clean token's and K others.

    The others are drawn as order statistics of V - 1 Gaussians, largest first, so the state
    z_t = argmax w_t is exact (the token of the largest weight), and so are the weights if
    K = V - 1; with fewer they are those of the K + 1 tokens among themselves.

    Shapes: x (B, L), alpha (B, 1), uniforms (B, L, K + 1) and picks (B, L, K) in [0, 1), float64
    -> tokens and weights (B, L, K + 1), the clean token first.
    """
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

    A pick chooses among the numbers that are left, in rising order.
    """
    left = count - torch.arange(picks.shape[-1], device=picks.device)
    places = (picks * left).int()
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
    """Map numbers below V - 1 to the tokens other than x."""
    return number + (number >= x)


def level_of_gamma(gamma: Tensor) -> Tensor:
    """Return alpha_tilde at gamma = log(sigma_tilde^2 / alpha_tilde^2)."""
    return torch.sigmoid(-gamma).sqrt()
