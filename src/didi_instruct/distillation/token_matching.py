"""Token-level matching: the divergence of DiDi-Instruct descended token by token.

The student walks along its own N-step path to a state z and draws the tokens of the next step. Some
of them are shown (context c), the rest hidden again; an auxiliary denoiser φ learns what the
student would put there. For a hidden position the context does not depend on the student's own
token, so the expectation over that token is exact:

    loss = sum_v p_ν(v | z) stopgrad[log p_φ(v | c) - log p_θ(v | c)]
"""

from typing import Any

import torch
from torch import Tensor

from didi_instruct.distillation.auxiliary import (
    Drawn,
    Plan,
    StudentLogits,
    auxiliary_networks,
    take_turns,
)
from didi_instruct.distillation.losses import advantages, divergence, entropy, kl
from didi_instruct.distillation.rollout import path_step
from didi_instruct.distillation.run import (
    Distillation,
    Loss,
    MethodEntry,
    MicroBatch,
    budget_flags,
)
from didi_instruct.process.masking import stratified_times
from didi_instruct.sampling.draw import Purpose
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent


class TokenMatching:
    """Student and auxiliary denoiser, in turns."""

    def __init__(self, d: Distillation, auxiliary: Any) -> None:
        self.d, self.settings = d, d.config.token_matching
        self.auxiliary = d.learner(auxiliary, self.settings.aux_lr)
        self.learners = {"auxiliary": self.auxiliary}
        self.state: dict[str, Tensor] = {}

    def step(self, step: int) -> Metrics:
        return take_turns(self, step, self.settings.aux_steps) | self.d.start_metrics(step)

    def plan(self, batch: MicroBatch) -> Plan:
        d, settings, noise = self.d, self.settings, batch.noise.planned
        states = noise.of_groups(settings.contexts)
        generator = d.generator("budgets", batch.step, batch.turn)
        strata = stratified_times(d.config.train.batch_size // settings.contexts, generator)
        first = (batch.step * settings.aux_steps + batch.turn) * len(strata)
        start, owner = d.starts(states, d.prompts(first, states.samples))
        place, opened = strata[states.samples], (start == d.mask_id)[owner]
        path = path_step(settings.budgets, place, opened, states, d.schedule, d.config.order)
        # A random share of what the step reveals is shown, the rest hidden again.
        text = torch.arange(len(batch.indices))
        state = text // settings.contexts
        # Draws that the completion term compares differ in their tokens alone.
        coins, which = (states, state) if settings.completion else (noise, text)
        share = coins.uniforms(1, Purpose.SELECT, 0)
        shown = (coins.uniforms(d.length, Purpose.SELECT, 1) < share)[which]
        hidden = path.revealed[state] & ~shown
        # The context's time is that at which as much is masked.
        alpha, after = d.schedule.alpha(path.t), d.schedule.alpha(path.after.clamp(min=0))
        alpha, after = alpha[state], after[state]
        t_context = d.schedule.time(alpha + share[which].squeeze(1) * (after - alpha))
        stream = Purpose.TOKEN, path.times.shape[1], Purpose.SELECT
        return Plan(batch, start, owner, path, state, hidden, t_context, stream)

    def student_logits(self, plan: Plan) -> StudentLogits:
        """Logits of the student, which sees the texts as they are."""
        d = self.d
        return lambda z, rows, t, at: d.student.logits(
            d.reads(z if rows is None else z[rows]), t, at
        )

    def loss(self, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor) -> Loss:
        """Matching, anchor and completion terms of one part, and numbers of them."""
        d, settings, clip = self.d, self.settings, self.settings.ratio_clip
        log_theta = d.teacher_log_probs(d.reads(drawn.context), drawn.t_context, drawn.hidden)
        ratio = log_phi - log_theta
        clipped = ratio.clamp(-clip, clip) if clip else ratio
        log_p = drawn.log_p[sent(plan.rows_of(plan.hidden), drawn.log_p.device)]
        loss = matching = matching_loss(log_p, clipped).sum() / counts[0]
        changed = (clipped != ratio)[:, : d.model_config.num_tokens]
        numbers = {
            "entropy": entropy(drawn.log_p.detach()).sum() / counts[1],
            "matching_loss": matching,
            "aux_kl": kl(log_phi, log_theta).sum() / counts[0],
            "ratio_clip_fraction": changed.double().mean(-1).sum() / counts[0],
        }
        if settings.anchor:
            at = flat_positions(plan.path.revealed)
            log_anchor = d.teacher_log_probs(d.reads(drawn.z), drawn.t, at)
            numbers["kl"] = divergence(settings.kl, log_anchor, drawn.log_p).sum() / counts[1]
            loss = loss + settings.anchor * numbers["kl"]
        if settings.completion:
            gaps = matching_loss(log_p.detach(), clipped)
            completion = completion_term(plan, drawn, gaps, settings.contexts)
            loss = loss + settings.completion * completion / counts[0]
        return loss, numbers


def matching_loss(log_p: Tensor, log_ratio: Tensor) -> Tensor:
    """Expected log-ratio under the student, exact over the token: (R, V), (R, V) -> (R,).

    Its gradient is the partial derivative of KL(q_ν(x | c) ‖ p_θ(x | c)) with respect to p_ν(. | z)
    when the ratio is exact.
    """
    return (log_p.exp() * log_ratio).sum(-1)


def completion_term(plan: Plan, drawn: Drawn, gaps: Tensor, contexts: int) -> Tensor:
    """REINFORCE for the shown tokens: they make the hidden ones harder or easier to match.

    The cost of a context is what its hidden positions lose, the expected log-ratio under the
    student, gaps (R,); it is compared with the other contexts of the same state, which show other
    tokens at the same positions.
    """
    cost = torch.zeros(len(drawn.x), dtype=torch.float64, device=gaps.device)
    cost = cost.index_add(0, drawn.hidden // drawn.x.shape[1], gaps.double())
    excess = advantages(cost, contexts, baseline="leave-one-out", scale="none").values
    shown = plan.drawn & ~plan.hidden
    host = flat_positions(shown), plan.rows_of(shown)
    at, rows = (sent(each, gaps.device) for each in host)
    log_p = drawn.log_p[rows, drawn.x.flatten()[at]]
    return (excess[at // drawn.x.shape[1]] * log_p).sum()


ENTRY = MethodEntry(
    networks=auxiliary_networks,
    make=TokenMatching,
    lr_setting_names="optim.lr or token_matching.aux_lr",
    collapse_metric="path_entropy",
    restraint="token_matching.anchor",
    any_order=True,
    sampling_flags=lambda config: budget_flags(config.token_matching.budgets),
)
