"""Self-distillation through time (SDTT): one step of the student learns to be worth two.

A text of the data or of the teacher is masked to z_t. The teacher takes two small ancestral steps
from there, t -> t - dt -> t - 2 dt, and leaves a target at every mask: the law from which a
position was revealed on the way, or that of the last step where it was not. The student, who sees
z_t alone, learns the target. After a round of this the student is the teacher, and dt doubles:

    round r:  dt = 2^r / steps,  r = 0, 1, ...

so that 7 rounds lead from 1,024 steps to 8. As in the published code, a new teacher is the student
as it is (not its average), and the optimizer goes on with its moments.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.losses import divergence, entropy
from didi_instruct.distillation.run import Distillation, Loss, MethodEntry, MicroBatch
from didi_instruct.process.masking import reveal_probability, revealed_shares, stratified_times
from didi_instruct.sampling.denoiser import Logits
from didi_instruct.sampling.draw import Purpose, draw_tokens
from didi_instruct.sampling.plan import flat_positions, local_positions
from didi_instruct.sampling.state import Reads
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent

SMALLEST = 1e-3
"""Times of the published grid are never below it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of a pass, and what the teacher will do from there."""

    z: Tensor  # (B, L) the texts, masked
    t: Tensor  # (B,) their times
    times: tuple[Tensor, Tensor]  # (B,) each: when the teacher takes its first step and its second
    first: Tensor  # (B, L) masks that its first step reveals
    uniforms: Tensor  # (B, L) in [0, 1): which tokens it draws there


def teacher_times(t: Tensor, dt: float, grid: str) -> tuple[Tensor, Tensor]:
    """When the teacher steps: t and t - dt, or what the published code makes of it.

    That means to space times evenly between t and t - 2 dt, but weighs the end by 1 - t instead of
    by its place: with e = (1 - t)(t - 2 dt), steps are taken at t + e and at e. Of the masks, the
    first step so reveals dt / (t + e) instead of dt / t, less by a factor of up to 2 - t.

    Shapes: t (B,) -> (B,), (B,).
    """
    if grid == "published":
        end = (1 - t) * (t - 2 * dt)
        return (t + end).clamp(min=SMALLEST), end.clamp(min=SMALLEST)
    return t, (t - dt).clamp(min=0)


@torch.no_grad()
def two_step_target(
    log_probs: Logits, part: Part, mask_id: int, reads: Callable[[Tensor], Reads] = Reads
) -> Tensor:
    """Log-probabilities (R, V) that the teacher leaves at the masks of a part, in order.

    Positions that the second step does not reveal have its law all the same, so only the first step
    has to be taken.
    """
    z, length, masked = part.z, part.z.shape[1], part.z == mask_id
    # Where nothing is revealed nothing is read; one text is, so that all processes call alike.
    active = part.first.any(1)
    active[0] |= ~active.any()
    rows = active.nonzero().squeeze(1)
    first, rest = flat_positions(part.first), flat_positions(masked & ~part.first)
    early = log_probs(reads(z[rows]), part.times[0][rows], local_positions(first, rows, length))
    row = torch.arange(len(early), device=early.device)
    token, _ = draw_tokens(early, part.uniforms.flatten()[first], row)
    then = z.flatten().index_copy(0, first, token).view_as(z)
    late = log_probs(reads(then), part.times[1], rest)
    place = masked.flatten().cumsum(0) - 1
    target = late.new_empty(len(first) + len(rest), late.shape[1])
    target[place[first]], target[place[rest]] = early, late
    return target


def distance(kind: str, log_target: Tensor, log_student: Tensor) -> Tensor:
    """Distance of the student from its target: (..., V), (..., V) -> (...).

    backward: KL(student ‖ target); forward: KL(target ‖ student); mse: mean squared difference of
    the log-probabilities; tv: total variation, half the sum of absolute differences.
    """
    match kind:
        case "mse":
            return (log_student - log_target).square().mean(-1)
        case "tv":
            return (log_student.exp() - log_target.exp()).abs().sum(-1) / 2
    return divergence(kind, log_target, log_student)


class Sdtt:
    """A student that learns two steps of its teacher, then of itself."""

    def __init__(self, d: Distillation, before: Any) -> None:
        self.d, self.rounds = d, d.config.sdtt.rounds(d.config.train.steps)
        self.before = d.frozen(before)
        """The student at the end of the round before: the teacher of all rounds but the first."""
        self.learners = {"teacher": self.before}
        self.state: dict[str, Tensor] = {}

    def step(self, step: int) -> Metrics:
        """One update from one batch of texts; a round begins with a new teacher."""
        d = self.d
        dt = 2 ** self.rounds.of(step) / d.config.sdtt.steps  # length of the teacher's steps
        if self.rounds.begins(step):
            self.before.take(d.student)
        teacher = self.before.log_probs if self.rounds.of(step) else d.teacher_log_probs
        parts = [make_part(d, batch, dt) for batch in d.micro_batches(step)]
        count = d.count((part.z == d.mask_id).sum() for part in parts)

        def loss_of(part: Part) -> Loss:
            target = two_step_target(teacher, part, d.mask_id, d.reads)
            at = flat_positions(part.z == d.mask_id)
            log_p = d.student.log_probs(d.reads(part.z), part.t, at)
            loss = distance(d.config.sdtt.divergence, target, log_p).sum() / count
            return loss, {
                "entropy": entropy(log_p.detach()).sum() / count,
                "target_entropy": entropy(target).sum() / count,
            }

        metrics = d.descend(step, loss_of, parts)
        return metrics | {"student_steps": d.number(1 / (2 * dt)), **d.start_metrics(step)}


def make_part(d: Distillation, batch: MicroBatch, dt: float) -> Part:
    """Take texts, mask them, and decide what the teacher's first step reveals."""
    x, noise = d.reference_texts(batch), batch.noise
    strata = stratified_times(d.config.train.batch_size, d.generator("times", batch.step))
    t = sent(strata[batch.indices].double(), x.device)
    shares = revealed_shares(d.schedule, t[:, None])
    visible = noise.uniforms(d.length, Purpose.REMASK) < shares
    z = x.masked_fill(d.starts.open(x) & ~visible, d.mask_id)
    times = teacher_times(t, dt, d.config.sdtt.grid)
    coins = noise.uniforms(d.length, Purpose.REVEAL)
    then = d.schedule.alpha((times[0] - dt).clamp(min=0))
    chance = reveal_probability(then, d.schedule.alpha(times[0]))  # 1 where the step ends at time 0
    first = (z == d.mask_id) & (coins < chance[:, None])
    return Part(z, t, times, first, noise.uniforms(d.length, Purpose.TOKEN))


def _networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, Any]:
    """The teacher of later rounds is a copy of the student."""
    return student, copy.deepcopy(student)


def _sampling_flags(config: DistillConfig) -> str:
    rounds = config.sdtt.rounds(config.train.steps)
    return f"--steps {config.sdtt.steps // 2**rounds.count}"


ENTRY = MethodEntry(
    networks=_networks,
    make=Sdtt,
    texts="reference",
    pads=False,  # one of its distances is a mean over the vocabulary
    sampling_flags=_sampling_flags,
)
