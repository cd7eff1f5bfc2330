"""Token-level matching: the divergence of DiDi-Instruct descended token by token.

The student walks along its own N-step path to a state z and draws the tokens of the next step. Some
of them are shown (context c), the rest hidden again; an auxiliary denoiser φ learns what the
student would put there. For a hidden position the context does not depend on the student's own
token, so the expectation over that token is exact:

    loss = sum_v p_ν(v | z) stopgrad[log p_φ(v | c) - log p_θ(v | c)]
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from didi_instruct.distillation.budgets import path_times
from didi_instruct.distillation.critics import AuxiliaryTask
from didi_instruct.distillation.hosting import Tensors, law
from didi_instruct.distillation.monitor import Totals, unique_ngrams
from didi_instruct.distillation.rewards import advantages
from didi_instruct.distillation.rollout import (
    Jump,
    Noise,
    draw_from,
    order_of,
    revealed_between,
    walk,
)
from didi_instruct.process.divergences import divergence, entropy, kl
from didi_instruct.process.masking import revealed_shares, stratified_times
from didi_instruct.sampling.chain import Purpose
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent


@dataclass(frozen=True)
class Plan:
    """What happens to the texts of a part, known before any network is asked: on the host."""

    start: Tensor
    """(S, L) distinct starts."""
    owner: Tensor
    """(U,) the start of each state's walk."""
    times: Tensor
    """(U, K + 1) times of the walk; it stands still once it has arrived."""
    order: Tensor
    """(U, L) when positions are revealed."""
    t: Tensor
    """(U,) where the states are, the start of the step that is learned."""
    revealed: Tensor
    """(U, L) positions that this step reveals."""
    state: Tensor
    """(B,) the state of each context."""
    shown: Tensor
    """(B, L) revealed positions that the context keeps."""
    t_context: Tensor
    """(B,) noise level of the contexts."""

    @cached_property
    def hidden(self) -> Tensor:
        """(B, L) revealed positions that are hidden again."""
        return self.revealed[self.state] & ~self.shown

    def open(self, mask_id: int) -> Tensor:
        """(U, L) positions that the walks, taken to their ends, would write."""
        return (self.start == mask_id)[self.owner]

    def rows_of(self, where: Tensor) -> Tensor:
        """Rows of the student's law that belong to selected positions (B, L): (R,)."""
        return Jump(self.revealed, self.t, self.state, where).places(self.revealed)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step."""

    z: Tensor
    """(U, L) the states before it."""
    t: Tensor
    """(U,) their times."""
    x: Tensor
    """(B, L) the states with the step's tokens written."""
    context: Tensor
    """(B, L) the same with some of them hidden again."""
    t_context: Tensor
    """(B,) noise level of the contexts."""
    log_p: Tensor
    """(R, V) the student's law at the revealed positions, with its gradient if it learns."""
    log_prob: Tensor
    """Log-probability of all drawn tokens, 0-d."""

    def at(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Text and position of what a plan selects (B, L): (R,), (R,), where the tokens are."""
        text, position = where.nonzero(as_tuple=True)
        return sent(text, self.x.device), sent(position, self.x.device)


def matching_loss(log_p: Tensor, log_ratio: Tensor) -> Tensor:
    """Expected log-ratio under the student, exact over the token: (R, V), (R, V) -> (R,).

    Its gradient is the partial derivative of KL(q_ν(x | c) ‖ p_θ(x | c)) with respect to p_ν(. | z)
    when the ratio is exact.
    """
    return (log_p.exp() * log_ratio).sum(-1)


class TokenMatchingTask(AuxiliaryTask):
    """Student and auxiliary denoiser, in turns."""

    rates = "optim.lr or token_matching.aux_lr"

    def iterate(self, step: int) -> Tensors:
        """Several batches for the auxiliary denoiser; the last one is the student's too."""
        settings = self.config.token_matching
        self.remember_variety(step)
        for turn in range(settings.aux_steps):
            learns = self.learns(step) and turn == settings.aux_steps - 1
            plans = [self.plan(step, turn, indices) for indices in self.parts()]
            counts = self._counts(plans)
            totals = Totals()
            texts = []
            for indices, plan in zip(self.parts(), plans, strict=True):
                noise, last = self.noise(step, turn, indices), plan is plans[-1]
                drawn, log_phi = self._teach_auxiliary(
                    plan, noise, counts, totals, learns=learns, sync=last
                )
                if turn == settings.aux_steps - 1:
                    with torch.set_grad_enabled(learns):
                        loss = self._student_loss(plan, drawn, log_phi, counts, totals)
                    if learns:
                        self.student.backward(loss, sync=last)
                    texts.append(drawn.x[:: settings.contexts])
            aux_norm = self.critic_updater.update(step)
        numbers = self.summed(totals)
        if learns:
            numbers["grad_norm"] = self.updater.update(step - self.config.warmup)
        x = torch.cat(texts)
        opened = sent(torch.cat([p.open(self.mask_id) for p in plans]), x.device)
        written = (x != self.mask_id) & opened
        return numbers | {
            "aux_grad_norm": aux_norm,
            "unique_4gram": unique_ngrams(self.world.gather(x), self.world.gather(written)),
            **self.watched(step),
        }

    @torch.no_grad()
    def drawn_variety(self, turn: int) -> Tensor:
        """Path entropy per token of a batch that nobody learns from."""
        plans = [self.plan(0, turn, indices) for indices in self.parts()]
        counts, totals = self._counts(plans), Totals()
        for indices, plan in zip(self.parts(), plans, strict=True):
            drawn = self._draw(plan, self.noise(0, turn, indices), learns=False, sync=False)
            totals.add(entropy=self._path_entropy(drawn, counts))
        return self.summed(totals)["entropy"]

    def _path_entropy(self, drawn: Drawn, counts: Tensor) -> Tensor:
        """A part's share of the entropy per token."""
        return -drawn.log_prob / (counts[1] * self.config.token_matching.contexts)

    def _counts(self, plans: list[Plan]) -> Tensor:
        """Hidden positions of all contexts and revealed positions of all states, over all."""
        counts = [torch.stack([p.hidden.sum(), p.revealed.sum()]) for p in plans]
        total = sent(torch.stack(counts).sum(0).double(), self.world.device)
        return self.world.sum(total).clamp(min=1)

    def plan(self, step: int, turn: int, indices: Tensor) -> Plan:
        """Decide budgets, steps, reveals and contexts of a part; nothing depends on tokens."""
        settings, size = self.config.token_matching, self.config.token_matching.contexts
        noise = self.noise(step, turn, indices).on_host
        states = noise.of_groups(size) if size > 1 else noise
        seed = mix(self.config.train.seed, "budgets", step, turn)
        strata = stratified_times(
            self.config.train.batch_size // size, torch.Generator().manual_seed(seed)
        )
        order = self.config.order
        place = strata[states.indices]
        times, t, after, budget = path_times(settings.budgets, place, order, self.schedule)
        first = (step * settings.aux_steps + turn) * len(strata)
        start, owner = self.starts(states, self.prompts(first, states.indices))
        open = (start == self.mask_id)[owner]
        numbers = order_of(order, states, open, budget, settings.budgets)
        low, high = revealed_shares(self.schedule, torch.stack([t, after]))
        revealed = revealed_between(numbers, low, high) & open
        state = torch.arange(len(indices)) // size
        # Draws that the completion term compares differ in their tokens alone.
        coins = states if settings.completion else noise
        share = coins.uniforms(1, Purpose.SELECT, 0)
        shown = coins.uniforms(self.length, Purpose.SELECT, 1) < share
        share = share.repeat_interleave(len(indices) // len(share), 0)
        shown = shown.repeat_interleave(len(indices) // len(shown), 0) & revealed[state]
        t_context = self._context_time(t[state], after[state], share.squeeze(1))
        return Plan(start, owner, times, numbers, t, revealed, state, shown, t_context)

    def _context_time(self, t: Tensor, after: Tensor, share: Tensor) -> Tensor:
        """Time at which as much is masked as in a context that shows a share of a step."""
        alpha, then = self.schedule.alpha(t), self.schedule.alpha(after.clamp(min=0))
        return self.schedule.time(alpha + share * (then - alpha))

    def _teach_auxiliary(
        self, plan: Plan, noise: Noise, counts: Tensor, totals: Totals, *, learns: bool, sync: bool
    ) -> tuple[Drawn, Tensor]:
        """Draw a part and accumulate the auxiliary denoiser's gradients.

        Returns what was drawn, and the auxiliary log-probabilities (R, V) of the hidden positions.
        """
        drawn = self._draw(plan, noise, learns=learns, sync=sync)
        aux_law = law(self.schedule, drawn.context, drawn.t_context, plan.hidden)
        log_phi = self.critic.run(aux_law, sync=sync)["log_p"]
        aux_loss = -log_phi.gather(-1, drawn.x[drawn.at(plan.hidden)][:, None]).sum() / counts[0]
        self.critic.backward(aux_loss, sync=sync)
        totals.add(
            aux_loss=aux_loss,
            path_entropy=self._path_entropy(drawn, counts),
            entropy=entropy(drawn.log_p.detach()).sum() / counts[1],
        )
        return drawn, log_phi.detach()

    def _draw(self, plan: Plan, noise: Noise, *, learns: bool, sync: bool) -> Drawn:
        """Walk to the states and draw the next step, with the student's law kept for learning."""
        size = self.config.token_matching.contexts
        z = walk(
            self.student_logits,
            self.schedule,
            plan.start,
            plan.owner,
            plan.times,
            noise.of_groups(size) if size > 1 else noise,
            self.mask_id,
            plan.order,
        ).z
        plans = (plan.t, plan.t_context, plan.state, plan.hidden)
        t, t_context, state, hidden = (sent(each, z.device) for each in plans)
        with torch.set_grad_enabled(learns):
            student_law = law(self.schedule, z, t, plan.revealed)
            log_p = self.student.run(student_law, sync=sync)["log_p"]
        jump = Jump(z, t, plan.state, plan.revealed[plan.state])
        numbers = noise.uniforms(self.length, Purpose.TOKEN, plan.times.shape[1], Purpose.SELECT)
        token, log_prob = draw_from(log_p.detach(), jump, plan.revealed, numbers)
        x = z[state].index_put(jump.drawn, token)
        context = x.masked_fill(hidden, self.mask_id)
        return Drawn(z, t, x, context, t_context, log_p, log_prob.sum())

    def _student_loss(
        self, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor, totals: Totals
    ) -> Tensor:
        """Matching, anchor and completion terms of one part."""
        settings, clip = self.config.token_matching, self.config.token_matching.ratio_clip
        log_theta = self.teacher(drawn.context, drawn.t_context, plan.hidden)
        tokens = self.model_config.num_tokens
        ratio = log_phi - log_theta
        clipped = ratio.clamp(-clip, clip) if clip else ratio
        log_p = drawn.log_p[sent(plan.rows_of(plan.hidden), drawn.log_p.device)]
        loss = matching = matching_loss(log_p, clipped).sum() / counts[0]
        totals.add(
            matching_loss=matching,
            aux_kl=kl(log_phi, log_theta).sum() / counts[0],
            ratio_clip_fraction=(clipped != ratio)[:, :tokens].double().mean(-1).sum() / counts[0],
        )
        if settings.anchor:
            reference = self.teacher(drawn.z, drawn.t, plan.revealed)
            distance = divergence(settings.kl, reference, drawn.log_p).sum() / counts[1]
            loss = loss + settings.anchor * distance
            totals.add(kl=distance)
        if settings.completion:
            gaps = matching_loss(log_p.detach(), clipped)
            loss = loss + settings.completion * self._completion(plan, drawn, gaps) / counts[0]
        totals.add(loss=loss)
        return loss

    def _completion(self, plan: Plan, drawn: Drawn, gaps: Tensor) -> Tensor:
        """REINFORCE for the shown tokens: they make the hidden ones harder or easier to match.

        The cost of a context is what its hidden positions lose, the expected log-ratio under the
        student, gaps (R,); it is compared with the other contexts of the same state, which show
        other tokens at the same positions.
        """
        cost = torch.zeros(len(drawn.x), dtype=torch.float64, device=gaps.device)
        cost = cost.index_add(0, drawn.at(plan.hidden)[0], gaps.double())
        size = self.config.token_matching.contexts
        excess = advantages(cost, size, baseline="leave-one-out", scale="none").values
        context, position = drawn.at(plan.shown)
        rows = sent(plan.rows_of(plan.shown), gaps.device)
        log_p = drawn.log_p[rows, drawn.x[context, position]]
        return (excess[context] * log_p).sum()
