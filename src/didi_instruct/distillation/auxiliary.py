"""Student and auxiliary denoiser φ, in turns: the frame of token-matching and DiMO.

The student walks along a path of its own to a state z and draws the tokens of the next step. Some
of the text is hidden again, which leaves the context c. φ begins as the teacher θ and learns what
the student writes there, p_φ(x | c); where it differs from p_θ(x | c), the student has to change.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.rollout import PathStep, walk
from didi_instruct.distillation.run import Distillation, Loss, MicroBatch
from didi_instruct.distillation.watch import unique_ngrams
from didi_instruct.sampling.draw import draw_tokens
from didi_instruct.sampling.plan import Step, flat_positions
from didi_instruct.sampling.state import State
from didi_instruct.training.loop import Metrics
from didi_instruct.training.replica import Replica
from didi_instruct.transfer import sent

StudentLogits = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]
"""(texts (W, L), rows of them that are read (U,) or None for all, their times (U,), flat positions
in (U, L)) -> the student's logits (R, V), with gradient if gradients are on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about the texts of a part that no network decides; on the host."""

    batch: MicroBatch
    start: Tensor  # (S, L) distinct starts
    owner: Tensor  # (U,) the start of each state's walk
    path: PathStep  # the walk, and the step that is learned
    state: Tensor  # (B,) the state of each context
    hidden: Tensor  # (B, L) positions that are hidden again
    t_context: Tensor  # (B,) noise level of the contexts
    stream: tuple[int, ...]  # of the numbers that draw the step's tokens

    @property
    def contexts(self) -> int:
        """Contexts of each state."""
        return len(self.state) // len(self.owner)

    @property
    def drawn(self) -> Tensor:
        """(B, L) positions that the step writes."""
        return self.path.revealed[self.state]

    def rows_of(self, where: Tensor) -> Tensor:
        """Rows of the student's law that belong to drawn positions (B, L): (R,)."""
        text, position = where.nonzero(as_tuple=True)
        rank = self.path.revealed.flatten().cumsum(0) - 1
        return rank[self.state[text] * where.shape[1] + position]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step, where the networks are."""

    z: Tensor  # (U, L) the states before it
    t: Tensor  # (U,) their times
    x: Tensor  # (B, L) the states with the step's tokens written
    hidden: Tensor  # (H,) flat positions in (B, L) that are hidden again
    context: Tensor  # (B, L) the texts without them
    t_context: Tensor  # (B,) noise level of the contexts
    log_p: Tensor  # (R, V) the student's law at the revealed positions, with gradient if it learns
    log_prob: Tensor  # log-probability of all drawn tokens, 0-d


class AuxiliaryMethod(Protocol):
    """A method whose student learns from an auxiliary denoiser φ."""

    d: Distillation
    auxiliary: Replica

    def plan(self, batch: MicroBatch) -> Plan:
        """Decide all that does not depend on tokens."""

    def student_logits(self, plan: Plan) -> StudentLogits:
        """The student on its way through the texts of a plan."""

    def loss(self, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor) -> Loss:
        """A part's share of the student's loss, and numbers of it.

        log_phi (H, V) at the hidden positions; counts (2,) of hidden and of revealed positions.
        """


def draw_step(d: Distillation, plan: Plan, logits: StudentLogits, *, learns: bool) -> Drawn:
    """Walk to the states, draw the tokens of the next step, and hide some of the text."""
    path, noise, device = plan.path, plan.batch.noise, d.world.device

    def draw(texts: State, step: Step) -> tuple[Tensor, Tensor]:
        law = logits(texts.z, step.states, torch.as_tensor(step.t), step.reads)
        return draw_tokens(law, step.u, step.row)

    given = plan.start, plan.owner, path.times, path.order, noise.of_groups(plan.contexts)
    z, t = walk(draw, d.schedule, *given, d.mask_id)[0].z, sent(path.t, device)
    with torch.set_grad_enabled(learns):
        log_p = logits(z, None, t, flat_positions(path.revealed)).float().log_softmax(-1)
    uniforms = noise.uniforms(d.length, *plan.stream).flatten()
    host = plan.state, flat_positions(plan.drawn), plan.rows_of(plan.drawn)
    state, written, row = (sent(each, device) for each in host)
    token, log_prob = draw_tokens(log_p.detach(), uniforms[written], row)
    x = z[state]
    x.view(-1).index_copy_(0, written, token)
    hidden = sent(flat_positions(plan.hidden), device)
    context = x.flatten().index_fill(0, hidden, d.mask_id).view_as(x)
    t_context = sent(plan.t_context, device)
    return Drawn(z, t, x, hidden, context, t_context, log_p, log_prob.sum())


def take_turns(method: AuxiliaryMethod, step: int, turns: int) -> Metrics:
    """Update φ on fresh text `turns` times; the student learns from the last text too."""
    d, auxiliary = method.d, method.auxiliary
    for turn in range(turns):
        final = turn == turns - 1
        learns = d.learns(step) and final
        plans = [method.plan(batch) for batch in d.micro_batches(step, turn)]
        counts = d.count(torch.stack([p.hidden.sum(), p.path.revealed.sum()]) for p in plans)
        found, texts = [], []
        for plan in d.passes(plans):
            drawn = draw_step(d, plan, method.student_logits(plan), learns=learns)
            log_phi = auxiliary.log_probs(d.reads(drawn.context), drawn.t_context, drawn.hidden)
            truth = drawn.x.flatten()[drawn.hidden]
            aux_loss = -log_phi.gather(-1, truth[:, None]).sum() / counts[0]  # -log p_φ(x | c)
            auxiliary.backward(aux_loss)
            path_entropy = -drawn.log_prob / (counts[1] * plan.contexts)
            found.append({"aux_loss": aux_loss, "path_entropy": path_entropy})
            if final:
                loss, numbers = method.loss(plan, drawn, log_phi.detach(), counts)
                found[-1] |= {"loss": loss} | numbers
                if learns:
                    d.student.backward(loss)
                texts.append(drawn.x[:: plan.contexts])
        aux_norm = auxiliary.update(step)
    metrics = d.summed(found)
    if learns:
        metrics |= d.apply_gradients(step)
    x = torch.cat(texts)
    opened = torch.cat([(plan.start == d.mask_id)[plan.owner] for plan in plans])
    written = (x != d.mask_id) & sent(opened, x.device)
    unique = unique_ngrams(d.world.gather(x), d.world.gather(written))
    return metrics | {"aux_grad_norm": aux_norm, "unique_4gram": unique}


def auxiliary_networks(config: DistillConfig, teacher: Any, student: Any) -> tuple[Any, Any]:
    """The auxiliary denoiser begins as the teacher."""
    return student, copy.deepcopy(teacher).requires_grad_(True)
