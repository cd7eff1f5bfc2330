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
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import DIMO_NOISE, DIMO_RANDOM
from didi_instruct.distillation.auxiliary import (
    Drawn,
    Plan,
    StudentLogits,
    auxiliary_networks,
    take_turns,
)
from didi_instruct.distillation.losses import entropy, kl
from didi_instruct.distillation.rollout import path_step
from didi_instruct.distillation.run import Distillation, Loss, MethodEntry, MicroBatch
from didi_instruct.process.masking import stratified_times
from didi_instruct.sampling.dimo import Start
from didi_instruct.sampling.draw import Purpose
from didi_instruct.sampling.state import Reads
from didi_instruct.training.loop import Metrics
from didi_instruct.transfer import sent


class Dimo:
    """Student and auxiliary denoiser, in turns."""

    def __init__(self, d: Distillation, auxiliary: Any) -> None:
        self.d, self.settings = d, d.config.dimo
        self.auxiliary = d.learner(auxiliary, self.settings.aux_lr)
        self.start = Start(self.settings.random, self.settings.noise)
        self.learners = {"auxiliary": self.auxiliary}
        self.state: dict[str, Tensor] = {}

    def step(self, step: int) -> Metrics:
        return take_turns(self, step, self.settings.aux_steps)

    def plan(self, batch: MicroBatch) -> Plan:
        d, settings, size = self.d, self.settings, self.d.config.train.batch_size
        noise, everyone = batch.noise.planned, torch.arange(len(batch.indices))
        generator = d.generator("budgets", batch.step, batch.turn)
        place, level = (stratified_times(size, generator)[batch.indices] for _ in range(2))
        first = (batch.step * settings.aux_steps + batch.turn) * size
        start, owner = d.starts(noise, d.prompts(first, batch.indices))
        start = start[owner]
        path = path_step(settings.budgets, place, start == d.mask_id, noise, d.schedule)
        share = hidden_share(settings.remask, level.double())
        coins = noise.uniforms(d.length, Purpose.REMASK)
        hidden = (coins < share[:, None]) & (start == d.mask_id)
        t_context = d.schedule.time(1 - share)
        path = path._replace(revealed=path.masked)  # all that is left is written at once
        stream = Purpose.TOKEN, path.times.shape[1]
        return Plan(batch, start, everyone, path, everyone, hidden, t_context, stream)

    def student_logits(self, plan: Plan) -> StudentLogits:
        """Logits of the student, which is shown the start where nothing is written."""
        d, device, model = self.d, self.d.world.device, self.d.model_config
        start, noise = sent(plan.start, device), plan.batch.noise
        begun = self.start.begin(start, d.mask_id, model.hidden, noise, model.never_drawn)

        def logits(z: Tensor, rows: Tensor | None, t: Tensor, at: Tensor) -> Tensor:
            later, sigma, there = begun.later(z, d.mask_id), d.schedule.sigma(t), sent(at, device)
            seen = later if rows is None else later.only(rows)
            found: Tensor = d.student.run(
                lambda network: self.start.logits(network, seen, sigma, there)
            )
            return found

        return logits

    def loss(self, plan: Plan, drawn: Drawn, log_phi: Tensor, counts: Tensor) -> Loss:
        """A loss whose gradient is the token gradient, where both hidden and just written.

        The token gradient sums to 0, so it makes no difference that it meets log-probabilities
        instead of logits.
        """
        context, device = Reads(drawn.context), log_phi.device
        log_theta = self.d.teacher_log_probs(context, drawn.t_context, drawn.hidden)
        revealed, hidden = plan.path.revealed, plan.hidden
        learned = drawn.log_p[sent(hidden[revealed].nonzero().squeeze(1), device)]
        gradient = token_gradient(log_phi, log_theta, self.settings.beta)
        gradient = gradient[sent(revealed[hidden].nonzero().squeeze(1), device)]
        loss = (gradient * learned).sum() / counts[0]
        return loss, {
            "aux_kl": kl(log_phi, log_theta).sum() / counts[0],
            "tv": (log_phi.exp() - log_theta.exp()).abs().sum() / (2 * counts[0]),
            "entropy": entropy(learned.detach()).sum() / counts[0],
        }


def hidden_share(kind: str, uniforms: Tensor) -> Tensor:
    """Share of a text that is hidden again, from uniform numbers in [0, 1)."""
    return uniforms.acos() / (math.pi / 2) if kind == "arccos" else 1 - uniforms


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


def _sampling_flags(config: DistillConfig) -> str:
    own = {"random": (config.dimo.random, DIMO_RANDOM), "noise": (config.dimo.noise, DIMO_NOISE)}
    options = [f" --option {k}={v:g}" for k, (v, usual) in own.items() if v != usual]
    return f"--sampler dimo --steps {max(config.dimo.budgets)}{''.join(options)}"


ENTRY = MethodEntry(
    networks=auxiliary_networks,
    make=Dimo,
    lr_setting_names="optim.lr or dimo.aux_lr",
    collapse_metric="unique_4gram",  # entropy is that given the start, and may well end at 0
    restraint="dimo.random",
    starts_masked=False,
    sampling_flags=_sampling_flags,
)
