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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.dimo import NOISE, RANDOM
from didi_instruct.config.distill import DistillConfig
from didi_instruct.distillation.losses import entropy, kl
from didi_instruct.distillation.replica import Learner, Metrics
from didi_instruct.distillation.rollout import (
    Jump,
    draw_from,
    jump_step,
    path_times,
    revealed_between,
    texts_from,
)
from didi_instruct.distillation.run import Distillation, MethodEntry, MicroBatch
from didi_instruct.distillation.token_matching import auxiliary_networks
from didi_instruct.distillation.watch import RunningMean, Totals, unique_ngrams
from didi_instruct.process.masking import revealed_shares, stratified_times
from didi_instruct.sampling.ancestral import run
from didi_instruct.sampling.dimo import Seen, Start
from didi_instruct.sampling.draw import Purpose, draw_tokens
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import State
from didi_instruct.seeding import mix
from didi_instruct.transfer import sent


@dataclass(frozen=True, slots=True)
class Part:
    """Everything about some texts that no network decides."""

    batch: MicroBatch
    start: Tensor
    """(B, L) masks where to write."""
    times: Tensor
    """(B, K + 1) times of the walks; they stand still once they have arrived."""
    t: Tensor
    """(B,) times of arrival."""
    hidden: Tensor
    """(B, L) positions of the finished texts that are hidden again."""
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


def hidden_share(kind: str, uniforms: Tensor) -> Tensor:
    """Share of a text that is hidden again, from uniform numbers in [0, 1)."""
    return uniforms.acos() / (math.pi / 2) if kind == "arccos" else 1 - uniforms


class Dimo:
    """Student and auxiliary denoiser, in turns."""

    def __init__(self, d: Distillation, auxiliary: Any) -> None:
        self.d, self.auxiliary = d, d.learner(auxiliary, d.config.dimo.aux_lr)
        self.start = Start(d.config.dimo.random, d.config.dimo.noise)
        self.learners = {"auxiliary": self.auxiliary}
        self.state = {
            "watch/accuracy": RunningMean().state
        }  # checkpoints have it; nothing reads it

    def step(self, step: int) -> Metrics:
        """Several batches for the auxiliary denoiser; the last one is the student's too."""
        d, settings = self.d, self.d.config.dimo
        for turn in range(settings.aux_steps):
            final = turn == settings.aux_steps - 1
            learns = d.learns(step) and final
            parts = [make_part(d, batch) for batch in d.micro_batches(step, turn)]
            count = _sum(d, [part.hidden.sum() for part in parts]).clamp(min=1)
            totals, draws = Totals(), []
            for part in parts:
                drawn = draw_texts(d, self.start, part, learns=learns)
                context = drawn.x.masked_fill(part.hidden, d.mask_id)
                log_phi = update_auxiliary(self.auxiliary, part, drawn, context, count, totals)
                if final:
                    log_theta = d.teacher_log_probs(context, part.t_context, part.hidden)
                    loss, numbers = student_loss(
                        part.hidden, drawn, log_phi, log_theta, count, settings.beta
                    )
                    totals.add(loss=loss, **numbers)
                    if learns:
                        d.student.backward(loss, sync=part.batch.last)
                    draws.append(drawn)
            aux_norm = self.auxiliary.update(step)
        metrics = d.summed(totals) | _variety(d, draws, parts)
        if learns:
            metrics |= d.update_student(step)
        return metrics | {"aux_grad_norm": aux_norm}


def make_part(d: Distillation, batch: MicroBatch) -> Part:
    """Decide starts, walks and what is hidden; nothing depends on tokens."""
    settings, size, noise = d.config.dimo, d.config.train.batch_size, batch.noise
    seed = mix(d.config.train.seed, "budgets", batch.step, batch.turn)
    generator = torch.Generator().manual_seed(seed)
    strata, levels = (
        sent(stratified_times(size, generator)[batch.indices], d.world.device) for _ in range(2)
    )
    times, t, *_ = path_times(settings.budgets, strata)
    first = (batch.step * settings.aux_steps + batch.turn) * size
    start, state = d.starts(noise.on_host, d.prompts(first, batch.indices))
    start = sent(start[state], d.world.device)
    share = hidden_share(settings.remask, levels.double())
    coins = noise.uniforms(d.length, Purpose.REMASK)
    hidden = (coins < share[:, None]) & (start == d.mask_id)
    return Part(batch, start, times, t, hidden, d.schedule.time(1 - share))


def draw_texts(d: Distillation, start: Start, part: Part, *, learns: bool) -> Drawn:
    """Walk, and write all that is left; the student's law there is kept for learning."""
    z, begun = walk_from(d, start, part)
    last, batch = z == d.mask_id, part.batch
    with torch.set_grad_enabled(learns):
        seen = begun.later(z, d.mask_id)
        at = last.flatten().nonzero().squeeze(1)
        log_p = _log_probs(d, start, seen, part.t, at, sync=batch.last)
    jump = Jump(z, part.t, torch.arange(len(z), device=z.device), last)
    uniforms = batch.noise.uniforms(d.length, Purpose.TOKEN, part.times.shape[1])
    token, log_prob = draw_from(log_p.detach(), jump, last, uniforms)
    return Drawn(z.masked_scatter(last, token), last, log_p, log_prob.sum())


@torch.no_grad()
def walk_from(d: Distillation, start: Start, part: Part) -> tuple[Tensor, Seen]:
    """States (B, L) from which the texts are finished, and the starts they left from."""
    z, noise = part.start, part.batch.noise
    everyone = torch.arange(len(z), device=z.device)
    width, end_id = d.model_config.hidden, d.model_config.end_id
    begun = start.begin(z, d.mask_id, width, noise, end_id)
    order = noise.uniforms(d.length, Purpose.REVEAL)
    shares = revealed_shares(d.schedule, part.times)
    plan = []
    for k in range(part.times.shape[1] - 1):
        writes = revealed_between(order, shares[:, k], shares[:, k + 1]) & begun.unwritten
        jump = Jump(z, part.times[:, k], everyone, writes)
        plan.append(jump_step(jump, k, noise.uniforms(d.length, Purpose.TOKEN, k)))

    def draw(texts: State, step: Step) -> tuple[Tensor, Tensor]:
        assert step.states is not None
        assert isinstance(step.t, Tensor)
        seen = begun.later(texts.z, d.mask_id).only(step.states)
        log_p = _log_probs(d, start, seen, step.t, step.reads)
        return draw_tokens(log_p, step.u, step.row)

    texts = texts_from(z, d.mask_id)
    run(plan, texts, draw)
    return texts.z, begun


def _log_probs(
    d: Distillation, start: Start, seen: Seen, t: Tensor, at: Tensor, *, sync: bool = True
) -> Tensor:
    """The student's log-probabilities (R, V) at flat positions (R,), given what it is shown."""

    def forward(network: Any) -> Tensor:
        logits = start.logits(network, seen, d.schedule.sigma(t), at)
        return logits.float().log_softmax(-1)

    log_probs: Tensor = d.student.replica.run(forward, sync=sync)
    return log_probs


def update_auxiliary(
    auxiliary: Learner, part: Part, drawn: Drawn, context: Tensor, count: Tensor, totals: Totals
) -> Tensor:
    """Accumulate gradients of -log p_φ(x | c); return log p_φ (R, V) at the hidden positions."""
    log_phi = auxiliary.replica.log_probs_with_grad(
        context, part.t_context, part.hidden, sync=part.batch.last
    )
    loss = -log_phi.gather(-1, drawn.x[part.hidden][:, None]).sum() / count
    auxiliary.backward(loss, sync=part.batch.last)
    totals.add(aux_loss=loss)
    return log_phi.detach()


def student_loss(
    hidden: Tensor, drawn: Drawn, log_phi: Tensor, log_theta: Tensor, count: Tensor, beta: float
) -> tuple[Tensor, Metrics]:
    """A loss whose gradient is the token gradient, where both hidden and just written; numbers.

    The token gradient sums to 0, so it makes no difference that it meets log-probabilities instead
    of logits. Shapes: hidden (B, L), log_phi and log_theta (R, V) there.
    """
    gradient = token_gradient(log_phi, log_theta, beta)
    learned = drawn.log_p[hidden[drawn.last]]
    loss = (gradient[drawn.last[hidden]] * learned).sum() / count
    return loss, {
        "aux_kl": kl(log_phi, log_theta).sum() / count,
        "tv": (log_phi.exp() - log_theta.exp()).abs().sum() / (2 * count),
        "entropy": entropy(learned.detach()).sum() / count,
    }


def _variety(d: Distillation, draws: Sequence[Drawn], parts: Sequence[Part]) -> Metrics:
    """Entropy and distinct 4-grams of the texts of all processes."""
    x = torch.cat([drawn.x for drawn in draws])
    written = torch.cat([part.start for part in parts]) == d.mask_id
    log_prob = _sum(d, [drawn.log_prob for drawn in draws])
    count = _sum(d, [drawn.last.sum() for drawn in draws]).clamp(min=1)
    unique = unique_ngrams(d.world.gather(x), d.world.gather(written))
    return {"path_entropy": -log_prob / count, "unique_4gram": unique}


def _sum(d: Distillation, numbers: Sequence[Tensor]) -> Tensor:
    """A sum over parts and processes, float64."""
    return d.world.sum(torch.stack(list(numbers)).sum().double())


def _sampling_flags(config: DistillConfig) -> str:
    own = {"random": (config.dimo.random, RANDOM), "noise": (config.dimo.noise, NOISE)}
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
