"""Losses of answers given their prompts: masked diffusion, uniform-state diffusion, left to right.

Rows are (B, 2, L): tokens, and the part that each position belongs to. The prompt is never noise
and costs nothing; padding is not attended to. A loss is the mean over the tokens of an answer, so
long and short answers count alike.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.ar import ARModel
from didi_instruct.models.network import logits_at
from didi_instruct.process import masking, uniform
from didi_instruct.process.schedule import make_schedule
from didi_instruct.training.objectives import Batch, MaskedObjective, Objective

PADDING, GIVEN, ANSWER = 0, 1, 2
"""Parts of a row: after its end and not attended to, the prompt, what is to be learnt."""

AnswerMasking = Literal["count", "random"]


def make_answer_objective(
    config: ModelConfig, masks: AnswerMasking = "count", *, compile: bool = False
) -> Objective:
    """Return the objective of a model's kind on answers; `masks` is for masked diffusion alone."""
    if config.kind == "mdlm":
        return MaskedAnswers(config, masks, compile=compile)
    return UniformAnswers(config) if config.kind == "duo" else ARAnswers()


class MaskedAnswers:
    """NELBO of an answer given its prompt, Eq. (3) on the answer's positions.

    `random` masks each of the n tokens with probability 1 - alpha_t and weights by the schedule.
    `count` draws how many are masked, k uniform on 1 ... n, and weights by n / k: the same
    integral over t in closed form, since the integral of Binomial(k; n, m) / m over m in (0, 1) is
    1 / k. An answer of one token is then always masked. A network that is told the time is told
    one drawn from its law given k, which is that of the k-th smallest of n uniform numbers.
    """

    head_fraction = 0.5

    def __init__(
        self, config: ModelConfig, masks: AnswerMasking = "count", *, compile: bool = False
    ) -> None:
        self._whole = MaskedObjective(config, compile=compile)
        self.config, self.schedule, self.masks = config, self._whole.schedule, masks

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw numbers in (0, 1) per row and position and, with several masks, a code per row."""
        return self._whole.draw(count, generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Mask tokens of the answers: rows (B, 2, L)."""
        (text, part), (t, uniforms, *code) = tokens.unbind(1), noise
        length, answer = text.shape[1], part == ANSWER
        uniforms, n = uniforms[:, :length], answer.sum(1)
        if self.masks == "random":
            masked = answer & (uniforms >= self.schedule.alpha(t)[:, None])
            sigma, weight = self.schedule.sigma(t), self.schedule.nelbo_weight(t) / n
        else:
            numbers = uniforms.masked_fill(~answer, 2.0)
            k = (t * n).long().clamp(max=n - 1) + 1
            order = numbers.argsort(dim=1, stable=True)
            masked = order.argsort(dim=1, stable=True) < k[:, None]
            share = numbers.gather(1, order.gather(1, k[:, None] - 1)).squeeze(1)
            sigma, weight = self.schedule.sigma(self.schedule.time(1 - share)), 1 / k
        z = torch.where(masked, self._whole.mask_id, text)
        if code:
            z = masking.with_code(z, self._whole.mask_id, *code)
        rows = masked.flatten().nonzero().squeeze(1)
        sequence = rows // length
        return {
            "z": z,
            "sigma": sigma,
            "rows": rows,
            "sequence": sequence,
            "targets": text.flatten()[rows],
            "weight": weight[sequence],
            "attended": part != PADDING,
        }

    def loss(self, network: Any, batch: Batch) -> Tensor:
        return self._whole.loss(network, batch)


class UniformAnswers:
    """DUO's NELBO on the positions of an answer whose prompt is clean: mean of its integrand."""

    head_fraction = 1.0

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.schedule = config, make_schedule(config.schedule)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw times, uniforms, and the token that each position would be replaced with."""
        times, shape = masking.stratified_times(count, generator), (count, self.config.length)
        uniforms = torch.rand(shape, generator=generator)
        return times, uniforms, torch.randint(self.config.num_tokens, shape, generator=generator)

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """Replace tokens of the answers by random ones: rows (B, 2, L)."""
        (text, part), (t, uniforms, others) = tokens.unbind(1), noise
        length, alpha = text.shape[1], self.schedule.alpha(t)
        noisy = uniform.corrupt(text, alpha[:, None], uniforms[:, :length], others[:, :length])
        z = torch.where(part == ANSWER, noisy, text)
        rows, sequence = _answers(part)
        return {
            "z": z,
            "sigma": self.schedule.sigma(t),
            "rows": rows,
            "sequence": sequence,
            "x": text.flatten()[rows],
            "alpha": alpha[sequence],
            "alpha_prime": self.schedule.alpha_prime(t)[sequence],
            "weight": _shares(part)[sequence],
            "attended": part != PADDING,
        }

    def loss(self, network: Any, batch: Batch) -> Tensor:
        """Mean of the integrand over each answer, (B,)."""
        z, rows = batch["z"], batch["rows"]
        logits = logits_at(network, z, batch["sigma"], rows, batch["attended"])
        logits = logits[:, : self.config.num_tokens].float()
        levels = batch["alpha"], batch["alpha_prime"]
        nats = uniform.nelbo_integrand(logits, batch["x"], z.flatten()[rows], *levels)
        return _summed(nats, batch)


class ARAnswers:
    """Exact negative log-likelihood of an answer given its prompt."""

    head_fraction = 0.5

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return ()

    def corrupt(self, tokens: Tensor, *noise: Tensor) -> Batch:
        """The tokens as they are; padding comes last, where it is never read."""
        text, part = tokens.unbind(1)
        rows, sequence = _answers(part)
        return {"z": text, "rows": rows, "sequence": sequence, "weight": _shares(part)[sequence]}

    def loss(self, network: ARModel, batch: Batch) -> Tensor:
        """Mean over each answer of -log p(x^l | x^<l), (B,)."""
        return _summed(network.nll_at(batch["z"], batch["rows"]), batch)


def _answers(part: Tensor) -> tuple[Tensor, Tensor]:
    """Flat positions (R,) of the answers, and the row of each."""
    rows = (part == ANSWER).flatten().nonzero().squeeze(1)
    return rows, rows // part.shape[1]


def _shares(part: Tensor) -> Tensor:
    """1 over the number of tokens of each answer, (B,)."""
    return 1 / (part == ANSWER).sum(1)


def _summed(nats: Tensor, batch: Batch) -> Tensor:
    """Weighted sum over the positions of each row: (R,) -> (B,)."""
    zeros = nats.new_zeros(len(batch["z"]))
    return zeros.index_add(0, batch["sequence"], batch["weight"] * nats)
