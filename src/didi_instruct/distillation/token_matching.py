"""Token-level matching: the divergence of DiDi-Instruct descended token by token.

The student walks along its own N-step path to a state z and draws the tokens of the next step. Some
of them are shown (context c), the rest hidden again; an auxiliary denoiser φ learns what the
student would put there. For a hidden position the context does not depend on the student's own
token, so the expectation over that token is exact:

    loss = sum_v p_ν(v | z) stopgrad[log p_φ(v | c) - log p_θ(v | c)]
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig, TokenMatchingConfig
from didi_instruct.distillation.losses import advantages, divergence, entropy, kl
from didi_instruct.distillation.replica import Learner, Metrics
from didi_instruct.distillation.rollout import (
    Jump,
    draw_from,
    order_of,
    path_times,
    revealed_between,
    row_index,
    walk,
)
from didi_instruct.distillation.run import (
    Distillation,
    MethodEntry,
    MicroBatch,
    budget_flags,
)
from didi_instruct.distillation.watch import RunningMean, Totals, unique_ngrams
from didi_instruct.process.masking import revealed_shares, stratified_times
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.draw import Purpose
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent


@dataclass(frozen=True)
class Plan:
    """Everything about the texts of a part that no network decides; on the host."""

    start: Tensor
    """(S, L) distinct starts."""
    owner: Tensor
    """(U,) the start of each state's walk."""
    times: Tensor
    """(U, K + 1) times of the walk; it stands still once it has arrived."""
    order: Tensor
    """(U, L) when positions are revealed."""
    t: Tensor
    """(U,) times of the states, where the step that is learned starts."""
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
        text, position = where.nonzero(as_tuple=True)
        return row_index(self.revealed, self.state[text], position)


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


class TokenMatching:
    """Student and auxiliary denoiser, in turns."""

    def __init__(self, d: Distillation, auxiliary: Any) -> None:
        self.d, self.auxiliary = d, d.learner(auxiliary, d.config.token_matching.aux_lr)
        self.learners = {"auxiliary": self.auxiliary}
        self.state = {
            "watch/accuracy": RunningMean().state
        }  # checkpoints have it; nothing reads it

    def step(self, step: int) -> Metrics:
        """Several batches for the auxiliary denoiser; the last one is the student's too."""
        d, auxiliary, settings = self.d, self.auxiliary, self.d.config.token_matching
        for turn in range(settings.aux_steps):
            final = turn == settings.aux_steps - 1
            learns = d.learns(step) and final
            batches = d.micro_batches(step, turn)
            plans = [make_plan(d, batch) for batch in batches]
            counts = count_positions(d, plans)
            totals, texts = Totals(), []
            for batch, plan in zip(batches, plans, strict=True):
                drawn = draw_step(d, plan, batch, learns=learns)
                log_phi = update_auxiliary(auxiliary, batch, plan, drawn, counts, totals)
                totals.add(
                    path_entropy=-drawn.log_prob / (counts[1] * settings.contexts),
                    entropy=entropy(drawn.log_p.detach()).sum() / counts[1],
                )
                if final:
                    with torch.set_grad_enabled(learns):
                        loss, numbers = _student_loss(d, plan, drawn, log_phi, counts)
                    totals.add(loss=loss, **numbers)
                    if learns:
                        d.student.backward(loss, sync=batch.last)
                    texts.append(drawn.x[:: settings.contexts])
            aux_norm = auxiliary.update(step)
        metrics = d.summed(totals)
        if learns:
            metrics |= d.update_student(step)
        x = torch.cat(texts)
        opened = sent(torch.cat([plan.open(d.mask_id) for plan in plans]), x.device)
        written = (x != d.mask_id) & opened
        return metrics | {
            "aux_grad_norm": aux_norm,
            "unique_4gram": unique_ngrams(d.world.gather(x), d.world.gather(written)),
            **d.start_metrics(step),
        }


def make_plan(d: Distillation, batch: MicroBatch) -> Plan:
    """Decide budgets, steps, reveals and contexts of a part; nothing depends on tokens."""
    settings, order = d.config.token_matching, d.config.order
    noise = batch.noise.on_host
    states = noise.of_groups(settings.contexts)
    seed = mix(d.config.train.seed, "budgets", batch.step, batch.turn)
    strata = stratified_times(
        d.config.train.batch_size // settings.contexts, torch.Generator().manual_seed(seed)
    )
    place = strata[states.indices]
    times, t, after, budget = path_times(settings.budgets, place, order, d.schedule)
    first = (batch.step * settings.aux_steps + batch.turn) * len(strata)
    start, owner = d.starts(states, d.prompts(first, states.indices))
    open = (start == d.mask_id)[owner]
    numbers = order_of(order, states, open, budget, settings.budgets)
    low, high = revealed_shares(d.schedule, torch.stack([t, after]))
    revealed = revealed_between(numbers, low, high) & open
    text = torch.arange(len(batch.indices))
    state = text // settings.contexts
    # Draws that the completion term compares differ in their tokens alone.
    coins, which = (states, state) if settings.completion else (noise, text)
    share = coins.uniforms(1, Purpose.SELECT, 0)
    shown = (coins.uniforms(d.length, Purpose.SELECT, 1) < share)[which] & revealed[state]
    t_context = _context_time(d.schedule, t[state], after[state], share[which].squeeze(1))
    return Plan(start, owner, times, numbers, t, revealed, state, shown, t_context)


def _context_time(schedule: Schedule, t: Tensor, after: Tensor, share: Tensor) -> Tensor:
    """Time at which as much is masked as in a context that shows a share of a step."""
    alpha, then = schedule.alpha(t), schedule.alpha(after.clamp(min=0))
    return schedule.time(alpha + share * (then - alpha))


def count_positions(d: Distillation, plans: Sequence[Plan]) -> Tensor:
    """Hidden positions of all contexts, revealed positions of all states, of the whole batch."""
    counts = [torch.stack([plan.hidden.sum(), plan.revealed.sum()]) for plan in plans]
    total = sent(torch.stack(counts).sum(0).double(), d.world.device)
    return d.world.sum(total).clamp(min=1)


def draw_step(d: Distillation, plan: Plan, batch: MicroBatch, *, learns: bool) -> Drawn:
    """Walk to the states and draw the next step, with the student's law kept for learning."""
    z = walk(
        d.student.replica.logits,
        d.schedule,
        plan.start,
        plan.owner,
        plan.times,
        batch.noise.of_groups(d.config.token_matching.contexts),
        d.mask_id,
        plan.order,
    ).z
    plans = (plan.t, plan.t_context, plan.state, plan.hidden)
    t, t_context, state, hidden = (sent(each, z.device) for each in plans)
    with torch.set_grad_enabled(learns):
        student = d.student.replica
        log_p = student.log_probs_with_grad(z, t, plan.revealed, sync=batch.last)
    jump = Jump(z, t, plan.state, plan.revealed[plan.state])
    uniforms = batch.noise.uniforms(d.length, Purpose.TOKEN, plan.times.shape[1], Purpose.SELECT)
    token, log_prob = draw_from(log_p.detach(), jump, plan.revealed, uniforms)
    x = z[state].index_put(jump.index, token)
    context = x.masked_fill(hidden, d.mask_id)
    return Drawn(z, t, x, context, t_context, log_p, log_prob.sum())


def update_auxiliary(
    auxiliary: Learner, batch: MicroBatch, plan: Plan, drawn: Drawn, counts: Tensor, totals: Totals
) -> Tensor:
    """Accumulate gradients of -log p_φ(x | c); return log p_φ (R, V) at the hidden positions."""
    replica = auxiliary.replica
    log_phi = replica.log_probs_with_grad(
        drawn.context, drawn.t_context, plan.hidden, sync=batch.last
    )
    loss = -log_phi.gather(-1, drawn.x[drawn.at(plan.hidden)][:, None]).sum() / counts[0]
    auxiliary.backward(loss, sync=batch.last)
    totals.add(aux_loss=loss)
    return log_phi.detach()


def _student_loss(
    d: Distillation, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor
) -> tuple[Tensor, Metrics]:
    settings, tokens = d.config.token_matching, d.model_config.num_tokens
    log_theta = d.teacher_log_probs(drawn.context, drawn.t_context, plan.hidden)
    anchor = None
    if settings.anchor:
        anchor = d.teacher_log_probs(drawn.z, drawn.t, plan.revealed)
    return student_loss(settings, plan, drawn, log_phi, log_theta, anchor, counts, tokens)


def student_loss(
    settings: TokenMatchingConfig,
    plan: Plan,
    drawn: Drawn,
    log_phi: Tensor,
    log_theta: Tensor,
    log_anchor: Tensor | None,
    counts: Tensor,
    num_tokens: int,
) -> tuple[Tensor, Metrics]:
    """Matching, anchor and completion terms of one part, and numbers of them.

    Log-probabilities (R, V): of φ and of the teacher at the hidden positions, of the teacher at the
    revealed positions of the states (for the anchor).
    """
    clip, ratio = settings.ratio_clip, log_phi - log_theta
    clipped = ratio.clamp(-clip, clip) if clip else ratio
    log_p = drawn.log_p[sent(plan.rows_of(plan.hidden), drawn.log_p.device)]
    loss = matching = matching_loss(log_p, clipped).sum() / counts[0]
    changed = (clipped != ratio)[:, :num_tokens]
    numbers = {
        "matching_loss": matching,
        "aux_kl": kl(log_phi, log_theta).sum() / counts[0],
        "ratio_clip_fraction": changed.double().mean(-1).sum() / counts[0],
    }
    if log_anchor is not None:
        numbers["kl"] = divergence(settings.kl, log_anchor, drawn.log_p).sum() / counts[1]
        loss = loss + settings.anchor * numbers["kl"]
    if settings.completion:
        gaps = matching_loss(log_p.detach(), clipped)
        completion = completion_term(plan, drawn, gaps, settings.contexts)
        loss = loss + settings.completion * completion / counts[0]
    return loss, numbers


def completion_term(plan: Plan, drawn: Drawn, gaps: Tensor, contexts: int) -> Tensor:
    """REINFORCE for the shown tokens: they make the hidden ones harder or easier to match.

    The cost of a context is what its hidden positions lose, the expected log-ratio under the
    student, gaps (R,); it is compared with the other contexts of the same state, which show other
    tokens at the same positions.
    """
    cost = torch.zeros(len(drawn.x), dtype=torch.float64, device=gaps.device)
    cost = cost.index_add(0, drawn.at(plan.hidden)[0], gaps.double())
    excess = advantages(cost, contexts, baseline="leave-one-out", scale="none").values
    context, position = drawn.at(plan.shown)
    rows = sent(plan.rows_of(plan.shown), gaps.device)
    log_p = drawn.log_p[rows, drawn.x[context, position]]
    return (excess[context] * log_p).sum()


def auxiliary_networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, Any]:
    """The auxiliary denoiser begins as the teacher."""
    return student, copy.deepcopy(teacher).requires_grad_(True)


ENTRY = MethodEntry(
    networks=auxiliary_networks,
    make=TokenMatching,
    lr_setting_names="optim.lr or token_matching.aux_lr",
    collapse_metric="path_entropy",
    restraint="token_matching.anchor",
    any_order=True,
    ordered_teacher=True,
    sampling_flags=lambda config: budget_flags(config.token_matching.budgets),
)
