"""Steps that are mixtures: the tokens of a step share a code, and so know of each other.

A step of the usual student draws its tokens independently given the state, which is what few steps
cost. Here all masks of a text carry the same one of K ids in a step, a code c drawn uniformly:

    q(x_S | z) = 1/K sum_c prod_{i in S} q(x_i | z, c),

at the price of one pass, and up to log K nats per step nearer to the teacher. The student learns by
maximum likelihood: texts of the teacher (or data) are masked to a random state of a random budget,
and what the next step reveals is to be likely. The gradient of the log of a mixture is that of its
parts weighted by their posterior, so codes are drawn from the posterior, and only those learn.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import Order
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.budgets import path_times
from didi_instruct.distillation.hosting import law
from didi_instruct.distillation.monitor import Totals
from didi_instruct.distillation.rollout import (
    Noise,
    References,
    order_of,
    revealed_between,
)
from didi_instruct.distillation.task import DistillTask, Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT
from didi_instruct.process.masking import revealed_shares, stratified_times, with_code
from didi_instruct.sampling.chain import Purpose
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World
from didi_instruct.transfer import sent

TOKENS_PER_PASS = 1 << 18
"""Tokens of all codes that are read at once, at most."""


def add_masks(network: DiT, masks: int, seed: int, spread: float) -> DiT:
    """A copy of a denoiser that knows several masks.

    They differ from its own by noise of `spread` times the deviation of all embeddings. Codes that
    are nearly alike are a saddle: all have the same gradient, and it takes long to part them.
    """
    config = network.config
    grown = replace(config, masks=masks, vocab_size=config.num_tokens + masks)
    student = DiT(grown).to(next(network.parameters()).device)
    extra = masks - config.masks
    generator = torch.Generator().manual_seed(mix(seed, "masks"))
    state = network.state_dict()
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        old = state[name]
        new = old[-1:].expand(extra, *old.shape[1:]).clone()
        if name == "vocab_embed.embedding":
            new += spread * old.std() * torch.randn(new.shape, generator=generator).to(new)
        state[name] = torch.cat([old, new])
    student.load_state_dict(state)
    return student


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of a pass, masked to some state of a path, and what the next step reveals."""

    x: Tensor
    """(B, L) the texts."""
    z: Tensor
    """(B, L) their states, with the first mask."""
    t: Tensor
    """(B,) the states' times."""
    revealed: Tensor
    """(B, L)."""

    def repeated(self, times: int) -> "Part":
        """Each text several times in a row: for as many codes."""
        tensors = (self.x, self.z, self.t, self.revealed)
        return Part(*(tensor.repeat_interleave(times, 0) for tensor in tensors))


class MixtureTask(DistillTask):
    """A student with several masks, by maximum likelihood."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        *,
        references: References | None = None,
        data: TokenSource | None = None,
    ) -> None:
        codes = config.mixture.codes
        if student.config.masks > codes:
            raise UserError(
                f"mixture.codes is {codes}, but the student has {student.config.masks} masks: "
                "use as many or more."
            )
        if student.config.masks < codes:
            student = add_masks(student, codes, config.train.seed, config.mixture.spread)
        super().__init__(config, teacher, student, world, data)
        self.references = references or self.teacher_texts

    def iterate(self, step: int) -> dict[str, Tensor]:
        """One update from one batch of texts."""
        parts = [self.part(step, indices) for indices in self.parts()]
        counts = torch.stack([part.revealed.sum() for part in parts]).sum().double()
        count = self.world.sum(counts).clamp(min=1)
        totals = Totals()
        for indices, part in zip(self.parts(), parts, strict=True):
            last = part is parts[-1]
            if self.config.mixture.codes == 1:
                alone = torch.zeros(len(part.x), 1, dtype=torch.long, device=part.x.device)
                totals.add(loss=self._loss(part, alone, count, sync=last))
                continue
            each = self.log_likelihoods(part)
            code = self._posterior_codes(each, self.noise(step, 0, indices))
            loss = self._loss(part, code, count, sync=last)
            mixture = each.logsumexp(1) - math.log(each.shape[1])
            posterior = each.log_softmax(1)
            totals.add(
                loss=-mixture.sum() / count,
                component_loss=loss,
                # Of log K at most: what the codes say about the tokens of a step.
                code_information=(posterior.exp() * (posterior + math.log(each.shape[1]))).sum()
                / self.config.train.batch_size,
            )
        numbers = self.summed(totals)
        return numbers | {"grad_norm": self.updater.update(step)}

    def part(self, step: int, indices: Tensor) -> Part:
        """Take texts, and mask them as they are before a random step of a random budget."""
        batch = self.config.train.batch_size
        texts = self.references(step * batch + int(indices[0]), len(indices))
        x = sent(texts, self.world.device)
        noise = self.noise(step, 0, indices)
        seed = mix(self.config.train.seed, "budgets", step)
        strata = stratified_times(batch, torch.Generator().manual_seed(seed))
        place = sent(strata[indices], x.device)
        written = self.starts.open(x)
        t, after, numbers = self._place(self.config.order, noise, place, written)
        if self.config.mixture.random:
            other = self._place("random", noise, place, written)
            chosen = noise.uniforms(1, Purpose.SELECT) < self.config.mixture.random
            t, after = (
                torch.where(chosen.squeeze(1), b, a)
                for a, b in zip((t, after), other[:2], strict=True)
            )
            numbers = torch.where(chosen, other[2], numbers)
        low, high = revealed_shares(self.schedule, torch.stack([t, after]))
        z = x.masked_fill((numbers >= low[:, None]) & written, self.mask_id)
        return Part(x, z, t, revealed_between(numbers, low, high) & written)

    def _place(
        self, order: Order, noise: Noise, where: Tensor, written: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A step of a path in some order: its times (B,), (B,), and the order's numbers (B, L)."""
        budgets = self.config.mixture.budgets
        _, t, after, budget = path_times(budgets, where, order, self.schedule)
        return t, after, order_of(order, noise, written, budget, budgets)

    @torch.no_grad()
    def log_likelihoods(self, part: Part) -> Tensor:
        """Log-probability of what a step reveals under every code: (B, K) float64."""
        codes = torch.arange(self.config.mixture.codes, device=part.z.device)
        found = []
        for some in torch.split(codes, max(1, TOKENS_PER_PASS // part.z.numel())):
            again = part.repeated(len(some))
            coded = with_code(again.z, self.mask_id, some.repeat(len(part.x)))
            log_p = self.student_rows(coded, again.t, again.revealed)
            found.append(self._summed(again, log_p).view(len(part.x), len(some)))
        return torch.cat(found, 1)

    def _summed(self, part: Part, log_p: Tensor) -> Tensor:
        """Laws (R, V) of the revealed positions -> log-probabilities of the texts' tokens (B,)."""
        own = log_p.gather(-1, part.x[part.revealed][:, None]).squeeze(-1).double()
        found = torch.zeros(len(part.x), dtype=torch.float64, device=own.device)
        return found.index_add(0, part.revealed.nonzero()[:, 0], own)

    def _posterior_codes(self, each: Tensor, noise: Noise) -> Tensor:
        """Codes drawn from their posterior: (B, K) -> (B, M)."""
        numbers = noise.uniforms(self.config.mixture.learning, Purpose.CODE)
        below = each.softmax(1).cumsum(1)[:, None] <= numbers[..., None]
        return below.sum(-1).clamp(max=each.shape[1] - 1)

    def _loss(self, part: Part, code: Tensor, count: Tensor, *, sync: bool) -> Tensor:
        """Negative log-probability under the drawn codes (B, M), accumulated."""
        times = code.shape[1]
        again = part.repeated(times)
        coded = with_code(again.z, self.mask_id, code.flatten())
        log_p = self.student.run(law(self.schedule, coded, again.t, again.revealed), sync=sync)
        loss = -self._summed(again, log_p["log_p"]).sum() / (times * count)
        self.student.backward(loss, sync=sync)
        return loss
