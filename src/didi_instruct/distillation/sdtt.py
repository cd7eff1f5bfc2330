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
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.hosting import Host, law, rows_of
from didi_instruct.distillation.monitor import Totals
from didi_instruct.distillation.rollout import (
    Jump,
    References,
    Rows,
    draw_from,
)
from didi_instruct.distillation.task import DistillTask, Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT, Trunk
from didi_instruct.process.divergences import divergence, entropy
from didi_instruct.process.masking import reveal_probability, revealed_shares, stratified_times
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Purpose
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import World
from didi_instruct.transfer import sent

SMALLEST = 1e-3
"""Times of the published grid are never below it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of a pass, and what the teacher will do from there."""

    z: Tensor
    """(B, L) the texts, masked."""
    t: Tensor
    """(B,) how much."""
    times: tuple[Tensor, Tensor]
    """(B,) each: when the teacher takes its first step and its second."""
    first: Tensor
    """(B, L) masks that its first step reveals."""
    numbers: Tensor
    """(B, L) in [0, 1): which tokens it draws there."""


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


def first_chance(schedule: Schedule, time: Tensor, dt: float) -> Tensor:
    """Probability that the step from `time` (B,) reveals a mask; 1 where it ends at time 0."""
    then = schedule.alpha((time - dt).clamp(min=0))
    return reveal_probability(then, schedule.alpha(time))


@torch.no_grad()
def two_step_target(rows: Rows, part: Part, mask_id: int) -> Tensor:
    """Log-probabilities (R, V) that the teacher leaves at the masks of a part, in order.

    Whatever the second step does not reveal has its law all the same, so only the first step has to
    be taken.
    """
    masked, first = part.z == mask_id, part.first
    # Where nothing is revealed nothing is read; one text is, so that all processes call alike.
    active = first.any(1)
    active[0] |= ~active.any()
    early = rows(part.z[active], part.times[0][active], first[active])
    everyone = torch.arange(len(first), device=first.device)
    token, _ = draw_from(early, Jump(part.z, part.t, everyone, first), first, part.numbers)
    then = part.z.masked_scatter(first, token)
    late = rows(then, part.times[1], masked & ~first)
    target = late.new_empty(int(masked.sum()), late.shape[1])
    target[first[masked]], target[~first[masked]] = early, late
    return target


def distance(kind: str, log_target: Tensor, log_student: Tensor) -> Tensor:
    """How far the student is from its target: (..., V), (..., V) -> (...).

    backward: KL(student ‖ target); forward: KL(target ‖ student); mse: mean squared difference of
    the log-probabilities; tv: total variation, half the sum of absolute differences.
    """
    match kind:
        case "mse":
            return (log_student - log_target).square().mean(-1)
        case "tv":
            return (log_student.exp() - log_target.exp()).abs().sum(-1) / 2
    return divergence(kind, log_target, log_student)


class SDTTTask(DistillTask):
    """A student that learns two steps of its teacher, then of itself."""

    pads = False  # one of its distances is a mean over the vocabulary

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
        if student.config.masks > 1:
            raise UserError(
                f"The student has {student.config.masks} masks, which sdtt does not know: use "
                "method=mixture, or another student."
            )
        before = copy.deepcopy(student).requires_grad_(False)
        super().__init__(config, teacher, student, world, data)
        self.references = references or self.teacher_texts
        self.rounds = config.sdtt.rounds(config.train.steps)
        self.before = Host(before, config.train, world)
        """The student at the end of the round before: the teacher of all rounds but the first."""
        self._before_rows = rows_of(self.before, self.schedule)

    def round(self, step: int) -> int:
        """Which round an iteration belongs to, from 0."""
        return self.rounds.of(step)

    def dt(self, step: int) -> float:
        """Length of the teacher's steps."""
        return float(2 ** self.round(step) / self.config.sdtt.steps)

    def iterate(self, step: int) -> dict[str, Tensor]:
        """One update from one batch of texts; a round begins with a new teacher."""
        if self.rounds.begins(step):
            self._promote()
        rows = self._before_rows if self.round(step) else self.teacher
        parts = [self.part(step, indices) for indices in self.parts()]
        masks = torch.stack([(part.z == self.mask_id).sum() for part in parts]).sum().double()
        count = self.world.sum(masks).clamp(min=1)
        totals = Totals()
        for part in parts:
            target = two_step_target(rows, part, self.mask_id)
            self._learn(part, target, count, totals, sync=part is parts[-1])
        return self.summed(totals) | {
            "grad_norm": self.updater.update(step),
            "student_steps": self.number(1 / (2 * self.dt(step))),
            **self.watched(step),
        }

    @torch.no_grad()
    def _promote(self) -> None:
        """Make the student the teacher."""
        networks = (self.before.network, self.student.network)
        for old, new in zip(*(network.parameters() for network in networks), strict=True):
            old.copy_(new)

    def part(self, step: int, indices: Tensor) -> Part:
        """Take texts, mask them, and decide what the teacher's first step reveals."""
        batch, dt = self.config.train.batch_size, self.dt(step)
        texts = self.references(step * batch + int(indices[0]), len(indices))
        x = sent(texts, self.world.device)
        seed = mix(self.config.train.seed, "times", step)
        t = stratified_times(batch, torch.Generator().manual_seed(seed)).double()
        t = sent(t[indices], x.device)
        noise = self.noise(step, 0, indices)
        visible = noise.uniforms(self.length, Purpose.REMASK) < revealed_shares(
            self.schedule, t[:, None]
        )
        z = x.masked_fill(self.starts.open(x) & ~visible, self.mask_id)
        times = teacher_times(t, dt, self.config.sdtt.grid)
        coins = noise.uniforms(self.length, Purpose.REVEAL)
        chance = first_chance(self.schedule, times[0], dt)
        first = (z == self.mask_id) & (coins < chance[:, None])
        return Part(z, t, times, first, noise.uniforms(self.length, Purpose.TOKEN))

    def _learn(
        self, part: Part, target: Tensor, count: Tensor, totals: Totals, *, sync: bool
    ) -> None:
        """Accumulate the gradient of a part's distance from its target, a mean over masks."""
        student_law = law(self.schedule, part.z, part.t, part.z == self.mask_id)
        log_p = self.student.run(student_law, sync=sync)["log_p"]
        loss = distance(self.config.sdtt.divergence, target, log_p).sum() / count
        self.student.backward(loss, sync=sync)
        totals.add(
            loss=loss,
            entropy=entropy(log_p.detach()).sum() / count,
            target_entropy=entropy(target).sum() / count,
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """What learns, and the teacher of this round."""
        before = self.before.network.named_parameters()
        return {**super().tensors(), **{f"teacher/{n}": p.detach() for n, p in before}}

    def networks(self) -> list[Trunk]:
        """Those that a checkpoint holds."""
        return [*super().networks(), self.before.network]
