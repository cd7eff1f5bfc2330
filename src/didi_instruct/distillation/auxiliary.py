"""Student and auxiliary denoiser φ, in turns: the frame of token-matching and DiMO.

The student walks along a path of its own to a state z and draws the tokens of the next step. Some
of the text is hidden again, which leaves the context c. φ begins as the teacher θ and learns what
the student writes there, p_φ(x | c); where it differs from p_θ(x | c), the student has to change.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.replica import Learner, Loss, Metrics
from didi_instruct.distillation.rollout import PathStep, row_index, walk
from didi_instruct.distillation.run import Distillation, MicroBatch
from didi_instruct.distillation.watch import Totals, unique_ngrams
from didi_instruct.sampling.ancestral import Draw
from didi_instruct.sampling.draw import draw_tokens
from didi_instruct.transfer import sent


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step, where the networks are."""

    z: Tensor  # (U, L) the states before it
    t: Tensor  # (U,) their times
    x: Tensor  # (B, L) the states with the step's tokens written
    context: Tensor  # (B, L) the same with some of the text hidden again
    t_context: Tensor  # (B,) noise level of the contexts
    log_p: Tensor  # (R, V) the student's law at the revealed positions, with gradient if it learns
    log_prob: Tensor  # log-probability of all drawn tokens, 0-d

    def at(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Text and position of what a plan selects (B, L): (R,), (R,)."""
        text, position = where.nonzero(as_tuple=True)
        return sent(text, self.x.device), sent(position, self.x.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about the texts of a part that no network decides; on the host."""

    batch: MicroBatch
    start: Tensor  # (S, L) distinct starts
    owner: Tensor  # (U,) the start of each state's walk
    path: PathStep  # the walk, and the step that is learned
    revealed: Tensor  # (U, L) positions that this step writes
    state: Tensor  # (B,) the state of each context
    hidden: Tensor  # (B, L) positions that are hidden again
    t_context: Tensor  # (B,) noise level of the contexts

    @property
    def contexts(self) -> int:
        """Contexts of each state."""
        return len(self.state) // len(self.owner)

    @property
    def drawn(self) -> Tensor:
        """(B, L) positions that the step writes."""
        return self.revealed[self.state]

    @property
    def shown(self) -> Tensor:
        """(B, L) those of them that the context keeps."""
        return self.drawn & ~self.hidden

    def rows_of(self, where: Tensor) -> Tensor:
        """Rows of the student's law that belong to drawn positions (B, L): (R,)."""
        text, position = where.nonzero(as_tuple=True)
        return row_index(self.revealed, self.state[text], position)

    def walk(self, d: Distillation, draw: Draw) -> Tensor:
        """States (U, L) in which the steps that are learned start."""
        noise, path = self.batch.noise.of_groups(self.contexts), self.path
        given = self.start, self.owner, path.times, noise
        return walk(draw, d.schedule, *given, d.mask_id, path.order).z

    def write(self, z: Tensor, t: Tensor, log_p: Tensor, uniforms: Tensor, mask_id: int) -> Drawn:
        """Draw a step's tokens from its laws (R, V) by uniforms (B, L); hide some of the text."""
        text, position = (sent(index, z.device) for index in self.drawn.nonzero(as_tuple=True))
        row = sent(self.rows_of(self.drawn), z.device)
        token, log_prob = draw_tokens(log_p.detach(), uniforms[text, position], row)
        rest = (self.state, self.hidden, self.t_context)
        state, hidden, t_context = (sent(each, z.device) for each in rest)
        x = z[state].index_put((text, position), token)
        return Drawn(z, t, x, x.masked_fill(hidden, mask_id), t_context, log_p, log_prob.sum())


class AuxiliaryMethod(Protocol):
    """A method whose student learns from an auxiliary denoiser φ."""

    d: Distillation
    auxiliary: Learner

    def plan(self, batch: MicroBatch) -> Plan:
        """Decide all that does not depend on tokens."""

    def draw(self, plan: Plan, *, learns: bool) -> Drawn:
        """Walk to the states and draw the next step."""

    def loss(self, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor) -> Loss:
        """A part's share of the student's loss, and numbers of it.

        log_phi (R, V) at the hidden positions; counts (2,) of hidden and of revealed positions.
        """


def take_turns(method: AuxiliaryMethod, step: int, turns: int) -> Metrics:
    """Update φ on fresh text `turns` times; the student learns from the last text too."""
    d, auxiliary = method.d, method.auxiliary
    for turn in range(turns):
        final = turn == turns - 1
        learns = d.learns(step) and final
        plans = [method.plan(batch) for batch in d.micro_batches(step, turn)]
        counts = d.count(torch.stack([p.hidden.sum(), p.revealed.sum()]) for p in plans)
        totals, texts = Totals(), []
        for plan in plans:
            sync = plan.batch.last
            drawn = method.draw(plan, learns=learns)
            log_phi = auxiliary.replica.log_probs_with_grad(
                drawn.context, drawn.t_context, plan.hidden, sync=sync
            )
            truth = drawn.x[drawn.at(plan.hidden)]
            aux_loss = -log_phi.gather(-1, truth[:, None]).sum() / counts[0]  # -log p_φ(x | c)
            auxiliary.backward(aux_loss, sync=sync)
            path_entropy = -drawn.log_prob / (counts[1] * plan.contexts)
            totals.add(aux_loss=aux_loss, path_entropy=path_entropy)
            if final:
                loss, numbers = method.loss(plan, drawn, log_phi.detach(), counts)
                totals.add(loss=loss, **numbers)
                if learns:
                    d.student.backward(loss, sync=sync)
                texts.append(drawn.x[:: plan.contexts])
        aux_norm = auxiliary.update(step)
    metrics = d.summed(totals)
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
