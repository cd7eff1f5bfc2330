"""An iteration of DiDi-Instruct written naively, to time ours against.

Both are Algorithm 1 with the same loss and gradients. Ours reads each distinct state once and runs
the output layer where it is needed; here every text has an all-masked pass of its own, and
log-probabilities of all positions over the whole vocabulary are kept in every iteration, for the
teacher too.
"""

import copy
import itertools
from typing import Any

import torch
from torch import Tensor

from didi_instruct.benchmarking.naive_sampling import draw_dense
from didi_instruct.benchmarking.timing import Case
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import DiscriminatorConfig
from didi_instruct.config.train import Compile, TrainConfig
from didi_instruct.distillation.critic import Pair
from didi_instruct.distillation.didi import mean_log_prob
from didi_instruct.distillation.losses import PathScore, divergence, entropy
from didi_instruct.distillation.methods import make_task
from didi_instruct.distillation.rollout import Jump, Rollout
from didi_instruct.distillation.run import Distillation, MicroBatch, Teacher
from didi_instruct.models.dit import DiT
from didi_instruct.process.masking import posterior
from didi_instruct.training.distributed import World
from didi_instruct.training.loop import Metrics
from didi_instruct.training.replica import Replica

MAX_ITERATIONS = 1_000_000
"""`train.steps`, never reached."""
ITERATIONS = 4
"""Iterations per timed run, since training does not wait for the end of each one either."""


def dense_rollout(
    d: Distillation, batch: MicroBatch, tau: Tensor, prompts: Tensor | None
) -> Rollout:
    """Draw texts from dense probabilities; groupings that share z_τ are not supported."""
    didi, noise = d.config.didi, batch.noise
    assert didi.grouping != "state", "texts of a group would share their first steps"
    assert didi.score_decomposition, "the paper's algorithm goes through z_τ"
    start, state = d.starts(noise.planned, None if prompts is None else prompts.cpu())
    z, tau = (each.to(d.world.device) for each in (start[state], tau))
    written = z == d.mask_id
    seed = (noise.seed + int(noise.samples[0])) % 2**63
    generator = torch.Generator(z.device).manual_seed(seed)
    fractions = torch.linspace(0, 1, didi.rollout_steps + 1, dtype=torch.float64)
    times = [1 + (tau - 1) * float(f) for f in fractions]
    log_prob = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    jumps = []
    for t, s in itertools.pairwise([*times, torch.zeros_like(tau)]):
        log_p = _dense(d.student, z, t).double()
        alpha_s = torch.where(s > 0, d.schedule.alpha(s), 1.0)[:, None]
        law = posterior(z, log_p.exp(), alpha_s, d.schedule.alpha(t)[:, None], d.mask_id)
        drawn = draw_dense(law, generator)
        masked = z == d.mask_id
        writes = masked & (drawn < log_p.shape[-1])
        token = torch.where(writes, drawn, 0)
        own = log_p.gather(-1, token[..., None]).squeeze(-1)
        log_prob = log_prob + torch.where(writes, own, 0.0).sum(1)
        jumps.append(Jump(z, t, torch.arange(len(z), device=z.device), writes, masked))
        z = torch.where(writes, token, z)
    return Rollout(z, tuple(jumps), log_prob, written)


def dense_path_score(d: Distillation, pair: Pair) -> PathScore:
    """Eq. (9), KL and entropy from dense log-probabilities of student and teacher, by state."""
    didi, x, replica = d.config.didi, pair.rollout.x, d.student
    jumps = pair.rollout.jumps if didi.score_steps == "all" else pair.rollout.jumps[-1:]
    states = [(jump.z[jump.state], jump.t[jump.state]) for jump in jumps]
    laws: list[Tensor | None] = [None] * len(jumps)
    if didi.regularisation:
        laws = [_dense(d.teacher, *state) for state in states]

    def forward(network: Any) -> PathScore:
        log_prob = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        total_kl, total_entropy = torch.zeros_like(log_prob), torch.zeros_like(log_prob)
        for jump, (z, t), law in zip(jumps, states, laws, strict=True):
            log_p = _log_probs(replica, network, z, t)
            masked = z == d.mask_id
            own = log_p.gather(-1, x[..., None]).squeeze(-1)
            log_prob = log_prob + torch.where(jump.writes, own, 0.0).double().sum(1)
            total_entropy = total_entropy + _means(entropy(log_p), masked)
            if law is not None:
                total_kl = total_kl + _means(divergence(didi.kl, law, log_p), masked)
        return PathScore(log_prob, total_kl, total_entropy / len(jumps))

    score: PathScore = replica.run(forward)
    return mean_log_prob(score, jumps) if didi.log_prob == "mean" else score


NAIVE: dict[str, Any] = {
    "student_texts": dense_rollout,
    "path_score": dense_path_score,
    "keep_states": False,
}
"""Options of `distillation.didi.Didi` that make it naive."""


@torch.no_grad()
def _dense(replica: Replica, z: Tensor, t: Tensor) -> Tensor:
    """Log-probabilities (B, L, V), float32, without gradient."""
    log_probs: Tensor = replica.run(lambda network: _log_probs(replica, network, z, t))
    return log_probs


def _log_probs(replica: Replica, network: Any, z: Tensor, t: Tensor) -> Tensor:
    logits: Tensor = network(z, replica.schedule.sigma(t))
    return logits.float().log_softmax(-1)


def _means(values: Tensor, masked: Tensor) -> Tensor:
    """Mean over the masked positions of each text: (B, L) -> (B,)."""
    total = torch.where(masked, values, 0.0).double().sum(1)
    return total / masked.sum(1).clamp(min=1)


def distill_case(
    name: str, network: DiT, batch: int, length: int, world: World, *,
    bf16: bool, compile: Compile, naive: bool = False,
) -> Case:  # fmt: skip
    """Iterations on random reference texts; student and teacher are copies of `network`."""
    critic = DiscriminatorConfig(
        # Neither network ever waits for the other, whatever the texts are.
        chance=0.0, saturation=1.0, trainable_blocks=min(4, network.config.layers),
    )  # fmt: skip
    train = TrainConfig(
        steps=MAX_ITERATIONS, batch_size=batch, micro_batch=batch, compile=compile,
        precision="bf16" if bf16 else "fp32",
    )  # fmt: skip
    config = DistillConfig(discriminator=critic, train=train)
    student, teacher_network = copy.deepcopy(network), copy.deepcopy(network)
    teacher = Teacher(network=teacher_network, tokenizer=None, fingerprint="")

    def references(start: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(start)
        return torch.randint(network.config.num_tokens, (count, length), generator=generator)

    options = NAIVE if naive else {}
    task = make_task(config, teacher, student, world, references=references, **options)
    counter = itertools.count()

    def run(_: int) -> Metrics:
        return [task.step(next(counter)) for _ in range(ITERATIONS)][-1]

    return Case(
        name=name, run=run, batch=batch, length=length, steps=ITERATIONS, batches=ITERATIONS,
        networks=(teacher_network, *(part.network for part in task.parts.values())),
    )  # fmt: skip
