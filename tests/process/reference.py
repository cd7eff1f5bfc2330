"""The printed equations over whole vocabularies, and small languages to enumerate them with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import leggauss
from tests.sampling.enumeration import all_states
from torch import Tensor

from didi_instruct.process import masking, uniform
from didi_instruct.process.schedule import Schedule

V = 3
MASK = 7  # neither V nor a token: the id is free


def level(alpha: float) -> Tensor:
    return torch.tensor([[alpha]], dtype=torch.float64)


def entropy(p: Tensor) -> float:
    return torch.special.entr(p).sum().item()


def random_joint(length: int) -> Tensor:
    """Probabilities of all V^L texts, correlated and far from uniform."""
    generator = torch.Generator().manual_seed(0)
    return (1.5 * torch.randn(V**length, generator=generator, dtype=torch.float64)).softmax(0)


def quadrature(nodes: int = 60) -> list[tuple[Tensor, float]]:
    """Return times on (0, 1), each (1, 1), and weights; t = u^3 tames the log(1 / t) at t = 0."""
    points, weights = leggauss(nodes)
    halves = [((u + 1) / 2, w / 2) for u, w in zip(points, weights, strict=True)]
    return [(level(u**3), w * 3 * u**2) for u, w in halves]


def subs(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """Log-probabilities of the clean tokens under the SUBS parameterisation of MDLM.

    A masked position has the softmax of its logits; the mask itself has no column, so it is never
    predicted. A visible position is copied: log 1 at its token and log 0 elsewhere.

    Shapes: logits (B, L, V), z (B, L) -> (B, L, V).
    """
    visible = (z != mask_id)[..., None]
    copied = F.one_hot(z.masked_fill(z == mask_id, 0), logits.shape[-1]).to(logits.dtype).log()
    return torch.where(visible, copied, logits.log_softmax(-1))


def nelbo(log_probs_of_truth: Tensor, masked: Tensor, weight: Tensor) -> Tensor:
    """One-sample estimate of the continuous-time NELBO, Eq. (3), in nats per token.

    The weighted cross-entropy -alpha'_t / (1 - alpha_t) * -log p(x | z_t), summed over the masked
    positions and divided by the length. Its mean over t ~ U(0, 1) and z_t ~ q(z_t | x) bounds the
    negative log-likelihood of x from above if eps = 0, and an exact denoiser reaches the entropy
    H(x). If eps > 0 the integral ends at alpha = eps, and the price of the tokens still visible in
    z_1 is left out: an exact denoiser then gives H(x | z_1).

    Shapes: log_probs_of_truth (B, L), masked (B, L) bool, weight (B, 1) -> (B,).
    """
    return (weight * torch.where(masked, -log_probs_of_truth, 0.0)).mean(dim=-1)


def marginal(x: Tensor, alpha: Tensor, num_tokens: int) -> Tensor:
    """q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) / V) of uniform-state noise.

    Shapes: x (B, L), alpha (B, 1) -> (B, L, V).
    """
    alpha = alpha[..., None]
    return alpha * F.one_hot(x, num_tokens) + (1 - alpha) / num_tokens


@dataclass(frozen=True)
class Process:
    """A noise process by its definition, q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) noise).

    States of a position are numbered 0..S - 1; a mask is the last of V + 1.
    """

    name: str
    noise: Tensor
    """(S,) law of what replaces a token."""

    def states(self, length: int) -> Tensor:
        """All S^L states, (Z, L)."""
        return all_states(len(self.noise), length)

    def marginal(self, x: Tensor, alpha: Tensor) -> Tensor:
        """q(z_t | x): x (B, L), alpha (B, 1) -> (B, L, S)."""
        clean = F.one_hot(x, len(self.noise)).double()
        return alpha[..., None] * clean + (1 - alpha[..., None]) * self.noise

    def step(self, alpha_s: float, alpha_t: float) -> Tensor:
        """q(z_t | z_s) as a matrix (S, S), rows z_s."""
        keep = alpha_t / alpha_s
        return keep * torch.eye(len(self.noise), dtype=torch.float64) + (1 - keep) * self.noise

    def likelihoods(self, length: int, alpha: Tensor) -> Tensor:
        """q(z^l | x^l) for every state z, every text x and every l: (Z, X, L)."""
        q = self.marginal(all_states(V, length), alpha)
        z = self.states(length)[:, None].expand(-1, len(q), -1)
        return q.expand(len(z), -1, -1, -1).gather(-1, z[..., None]).squeeze(-1)

    def text_posterior(self, joint: Tensor, length: int, alpha: Tensor) -> Tensor:
        """q(x | z) for every state and text: (Z, X)."""
        weights = self.likelihoods(length, alpha).prod(-1) * joint
        return weights / weights.sum(1, keepdim=True)

    def denoiser(
        self, joint: Tensor, length: int, alpha: Tensor, *, has_seen_itself: bool = False
    ) -> Tensor:
        """What an exact denoiser knows of x^l, for every state: (Z, L, V).

        Of masks p(x^l | z); of uniform states p(x^l | z^{-l}), or p(x^l | z) if it has seen itself.
        """
        q = self.likelihoods(length, alpha)
        evidence = q.prod(-1, keepdim=True).expand_as(q)
        if self is UNIFORM and not has_seen_itself:
            evidence = evidence / q
        weights = evidence * joint[:, None]
        weights = weights / weights.sum(1, keepdim=True)
        return torch.einsum("zxl,xlv->zlv", weights, F.one_hot(all_states(V, length), V).double())

    def posterior(self, z: Tensor, p_x: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """The library's q(z_s | z_t, p_x): (B, L, S)."""
        if self is UNIFORM:
            return uniform.posterior(z, p_x, alpha_s, alpha_t)
        return masking.posterior(z.masked_fill(z == V, MASK), p_x, alpha_s, alpha_t, MASK)

    def paid(self, p_x: Tensor, schedule: Schedule, t: Tensor) -> Tensor:
        """Nats that p_x (Z, L, V) costs at time t, for every state and text: (Z, X)."""
        (num_states, length, _), num_texts = p_x.shape, V ** p_x.shape[1]
        z = self.states(length).repeat_interleave(num_texts, 0)
        x = all_states(V, length).repeat(num_states, 1)
        logits = p_x.log().repeat_interleave(num_texts, 0)
        if self is UNIFORM:
            alpha, alpha_prime = schedule.alpha(t), schedule.alpha_prime(t)
            cost = uniform.nelbo_integrand(logits, x, z, alpha, alpha_prime).sum(-1)
        else:
            truth = subs(logits, z, V).gather(-1, x[..., None]).squeeze(-1)
            cost = length * nelbo(truth, z == V, schedule.nelbo_weight(t))
        return cost.view(num_states, num_texts)

    def integrated_nelbo(
        self, joint: Tensor, length: int, schedule: Schedule, error: float = 0.0, **options: bool
    ) -> float:
        """E over x, z_t and t of what a denoiser pays; `error` perturbs its logits."""
        generator = torch.Generator().manual_seed(6)
        noise = torch.randn(len(self.states(length)), length, V, generator=generator)
        total = 0.0
        for t, dt in quadrature():
            alpha = schedule.alpha(t)
            p_x = self.denoiser(joint, length, alpha, **options)
            p_x = (p_x.log() + error * noise).softmax(-1)
            p_xz = self.likelihoods(length, alpha).prod(-1) * joint
            total += dt * (p_xz * self.paid(p_x, schedule, t)).sum().item()
        return total


MASKED = Process("masked", F.one_hot(torch.tensor(V), V + 1).double())
UNIFORM = Process("uniform", torch.full((V,), 1 / V, dtype=torch.float64))
