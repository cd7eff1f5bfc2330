"""DiMO, adapted to text: a generator of one step, or a few, that learns token by token.

The student starts from masks some of which are random tokens, with noise on their embeddings
(`sampling.dimo`), and writes a text. A part of the text is hidden again: c. An auxiliary denoiser φ
learns what the student would put there, and what it says in place of the teacher θ is the gradient
with respect to the student's logits at the hidden positions:

    forward KL:  p_φ(v | c) - p_θ(v | c)
    reverse KL:  p_φ(v | c) (log p_φ(v | c) - log p_θ(v | c) - KL(p_φ ‖ p_θ))

which are the derivatives of KL(p_θ ‖ p_φ) and KL(p_φ ‖ p_θ) with respect to the logits of φ, put to
those of the student, on whom φ depends in a way that nobody knows.

With several steps the student walks to a random step of its own path, and writes all that is left
from there. Other than published: how many positions are random or hidden is left to chance, all
weights learn, and the targets of φ are not smoothed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.distillation.budgets import path_times
from didi_instruct.distillation.critics import AuxiliaryTask
from didi_instruct.distillation.hosting import Tensors, law
from didi_instruct.distillation.monitor import Totals, unique_ngrams
from didi_instruct.distillation.rollout import (
    Jump,
    Noise,
    draw_from,
    revealed_between,
)
from didi_instruct.models.dit import DiT
from didi_instruct.process.divergences import entropy, kl
from didi_instruct.process.masking import revealed_shares, stratified_times
from didi_instruct.sampling.chain import Purpose
from didi_instruct.sampling.dimo import Seen, Start, later
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent


@dataclass(frozen=True, slots=True)
class Part:
    """What happens to some texts, known before any network is asked."""

    noise: Noise
    start: Tensor
    """(B, L) masks where to write."""
    times: Tensor
    """(B, K + 1) times of the walks; they stand still once they have arrived."""
    t: Tensor
    """(B,) where they arrive."""
    hidden: Tensor
    """(B, L) what is hidden of the texts in the end."""
    t_context: Tensor
    """(B,) noise level of texts of which so much is hidden."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Texts of the student."""

    x: Tensor
    """(B, L)."""
    last: Tensor
    """(B, L) positions that the last step wrote."""
    log_p: Tensor
    """(R, V) the student's law there, with its gradient if it learns."""
    log_prob: Tensor
    """Log-probability of what the last step wrote, 0-d."""


def token_gradient(log_phi: Tensor, log_theta: Tensor, beta: float) -> Tensor:
    """(1 - beta) d KL(θ ‖ φ) + beta d KL(φ ‖ θ), with respect to the logits of φ.

    Its sum over the tokens is 0. Shapes: (R, V), (R, V) -> (R, V).
    """
    phi = log_phi.exp()
    forward = phi - log_theta.exp()
    if not beta:
        return forward
    reverse = phi * (log_phi - log_theta - kl(log_phi, log_theta)[:, None])
    return (1 - beta) * forward + beta * reverse


def hidden_share(kind: str, numbers: Tensor) -> Tensor:
    """Share of a text that is hidden again, from uniform numbers in [0, 1)."""
    return numbers.acos() / (math.pi / 2) if kind == "arccos" else 1 - numbers


class DiMOTask(AuxiliaryTask):
    """Student and auxiliary denoiser, in turns."""

    rates = "optim.lr or dimo.aux_lr"
    shows_variety = "unique_4gram"  # entropy is that given the start, and may well end at 0

    @property
    def start(self) -> Start:
        """Where the student's texts begin."""
        return Start(self.config.dimo.random, self.config.dimo.noise)

    def iterate(self, step: int) -> Tensors:
        """Several batches for the auxiliary denoiser; the last one is the student's too."""
        settings = self.config.dimo
        self.remember_variety(step)
        for turn in range(settings.aux_steps):
            final = turn == settings.aux_steps - 1
            learns = self.learns(step) and final
            parts = [self.part(step, turn, indices) for indices in self.parts()]
            count = self._sum([part.hidden.sum() for part in parts])
            totals, draws = Totals(), []
            for part in parts:
                last = part is parts[-1]
                drawn = self.draw(part, learns=learns, sync=last)
                log_phi = self._teach_auxiliary(part, drawn, count, totals, sync=last)
                if final:
                    loss = self._student_loss(part, drawn, log_phi, count, totals)
                    if learns:
                        self.student.backward(loss, sync=last)
                    draws.append(drawn)
            aux_norm = self.critic_updater.update(step)
        numbers = self.summed(totals) | self._variety(draws, parts)
        if learns:
            numbers["grad_norm"] = self.updater.update(step - self.config.warmup)
        return numbers | {"aux_grad_norm": aux_norm}

    def part(self, step: int, turn: int, indices: Tensor) -> Part:
        """Decide starts, walks and what is hidden; nothing depends on tokens."""
        settings, batch = self.config.dimo, self.config.train.batch_size
        noise = self.noise(step, turn, indices)
        seed = mix(self.config.train.seed, "budgets", step, turn)
        generator = torch.Generator().manual_seed(seed)
        strata, levels = (
            sent(stratified_times(batch, generator)[indices], self.world.device) for _ in range(2)
        )
        times, t, *_ = path_times(settings.budgets, strata)
        first = (step * settings.aux_steps + turn) * batch
        start, owner = self.starts(noise.on_host, self.prompts(first, indices))
        start = sent(start[owner], self.world.device)
        share = hidden_share(settings.remask, levels.double())
        coins = noise.uniforms(self.length, Purpose.REMASK)
        hidden = (coins < share[:, None]) & (start == self.mask_id)
        return Part(noise, start, times, t, hidden, self.schedule.time(1 - share))

    def draw(self, part: Part, *, learns: bool, sync: bool) -> Drawn:
        """Walk, and write all that is left; the student's law there is kept for learning."""
        z, begun = self._walk(part)
        last = z == self.mask_id
        with torch.set_grad_enabled(learns):
            log_p = self._read(later(begun, z, self.mask_id), part.t, last, sync=sync)
        jump = Jump(z, part.t, torch.arange(len(z), device=z.device), last)
        numbers = part.noise.uniforms(self.length, Purpose.TOKEN, part.times.shape[1])
        token, log_prob = draw_from(log_p.detach(), jump, last, numbers)
        return Drawn(z.masked_scatter(last, token), last, log_p, log_prob.sum())

    @torch.no_grad()
    def _walk(self, part: Part) -> tuple[Tensor, Seen]:
        """Where the texts stand when they are to be finished, and the starts they left from."""
        z, everyone = part.start, torch.arange(len(part.start), device=part.start.device)
        width, end_id = self.model_config.hidden, self.model_config.end_id
        begun = self.start.begin(z, self.mask_id, width, part.noise.uniforms, end_id)
        order = part.noise.uniforms(self.length, Purpose.REVEAL)
        shares = revealed_shares(self.schedule, part.times)
        for k in range(part.times.shape[1] - 1):
            where = revealed_between(order, shares[:, k], shares[:, k + 1]) & begun.unwritten
            # Texts that stand still are not read; one is, so that all processes call alike.
            active = where.any(1)
            active[0] |= ~active.any()
            seen = later(begun, z, self.mask_id).only(active)
            laws = self._read(seen, part.times[active, k], where[active])
            jump = Jump(z, part.times[:, k], everyone, where)
            numbers = part.noise.uniforms(self.length, Purpose.TOKEN, k)
            z = z.masked_scatter(where, draw_from(laws, jump, where, numbers)[0])
        return z, begun

    def _read(self, seen: Seen, t: Tensor, where: Tensor, *, sync: bool = True) -> Tensor:
        """The student's log-probabilities (R, V) of selected positions."""

        def forward(network: DiT) -> Tensors:
            logits = self.start.logits(network, seen, self.schedule.sigma(t), where)
            return {"log_p": logits.float().log_softmax(-1)}

        return self.student.run(forward, sync=sync)["log_p"]

    def _teach_auxiliary(
        self, part: Part, drawn: Drawn, count: Tensor, totals: Totals, *, sync: bool
    ) -> Tensor:
        """Accumulate the auxiliary denoiser's gradients; its law (R, V) of what is hidden."""
        context = drawn.x.masked_fill(part.hidden, self.mask_id)
        aux_law = law(self.schedule, context, part.t_context, part.hidden)
        log_phi = self.critic.run(aux_law, sync=sync)["log_p"]
        loss = -log_phi.gather(-1, drawn.x[part.hidden][:, None]).sum() / count
        self.critic.backward(loss, sync=sync)
        totals.add(aux_loss=loss)
        return log_phi.detach()

    def _student_loss(
        self, part: Part, drawn: Drawn, log_phi: Tensor, count: Tensor, totals: Totals
    ) -> Tensor:
        """What has the token gradient as its gradient, at positions both hidden and just written.

        The token gradient sums to 0, so it makes no difference that it meets log-probabilities
        instead of logits.
        """
        context = drawn.x.masked_fill(part.hidden, self.mask_id)
        log_theta = self.teacher(context, part.t_context, part.hidden)
        gradient = token_gradient(log_phi, log_theta, self.config.dimo.beta)
        learned = drawn.log_p[part.hidden[drawn.last]]
        loss = (gradient[drawn.last[part.hidden]] * learned).sum() / count
        totals.add(
            loss=loss,
            aux_kl=kl(log_phi, log_theta).sum() / count,
            tv=(log_phi.exp() - log_theta.exp()).abs().sum() / (2 * count),
            entropy=entropy(learned.detach()).sum() / count,
        )
        return loss

    @torch.no_grad()
    def drawn_variety(self, turn: int) -> Tensor:
        """Distinct 4-grams of a batch that nobody learns from."""
        parts = [self.part(0, turn, indices) for indices in self.parts()]
        draws = [self.draw(part, learns=False, sync=False) for part in parts]
        return self._variety(draws, parts)["unique_4gram"]

    def _entropy(self, draws: list[Drawn]) -> Tensor:
        return -self._sum([d.log_prob for d in draws]) / self._sum([d.last.sum() for d in draws])

    def _variety(self, draws: list[Drawn], parts: list[Part]) -> Tensors:
        """How varied the texts of all processes are."""
        x = torch.cat([drawn.x for drawn in draws])
        written = torch.cat([part.start for part in parts]) == self.mask_id
        gathered = self.world.gather(x), self.world.gather(written)
        return {"path_entropy": self._entropy(draws), "unique_4gram": unique_ngrams(*gathered)}

    def _sum(self, numbers: list[Tensor]) -> Tensor:
        """A sum over parts and processes, 1 at least where it counts."""
        total = self.world.sum(torch.stack(numbers).sum().double())
        return total if numbers[0].is_floating_point() else total.clamp(min=1)
