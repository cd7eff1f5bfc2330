"""An iteration of DiDi-Instruct the plain way, beside ours.

Both are Algorithm 1 with the same loss. Ours reads each distinct state once and only the rows that
count; here every text has its own all-masked pass, and laws of all positions over the whole
vocabulary are kept, of the teacher too, in every iteration.
"""

import copy
import itertools

import torch
from torch import Tensor

from didi_instruct.benchmarking.naive import draw_dense
from didi_instruct.benchmarking.timing import Case
from didi_instruct.config.didi import DiscriminatorConfig
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.pretrain import Compile, TrainConfig
from didi_instruct.distillation.didi import DidiTask
from didi_instruct.distillation.discriminating import Compared
from didi_instruct.distillation.hosting import Host, Tensors
from didi_instruct.distillation.rollout import Jump, Noise, Rollout
from didi_instruct.distillation.task import Teacher
from didi_instruct.models.dit import DiT
from didi_instruct.process.divergences import divergence, entropy
from didi_instruct.process.masking import posterior
from didi_instruct.training.distributed import World

FIRST = 1
"""Iteration to begin with: before iteration 0 the student's entropy is measured on many texts."""
LAST = 1_000_000
TOGETHER = 4
"""Iterations of a timed run: training does not wait for the end of each one either."""


class NaiveDidiTask(DidiTask):
    """Algorithm 1 with dense laws everywhere; groups that share a z_τ are not known."""

    keeps_states = False

    def _roll_out(self, noise: Noise, tau: Tensor, prompts: Tensor | None) -> Rollout:
        didi = self.config.didi
        assert didi.grouping != "state", "texts of a group would share their first steps"
        assert didi.score_decomposition, "the paper's own algorithm goes through z_τ"
        rows = None if prompts is None else prompts.to(noise.device)
        start, owner = self.starts(noise, rows)
        z, tau = start[owner], tau.to(start.device)
        written = z == self.mask_id
        seed = (noise.seed + int(noise.indices[0])) % 2**63
        generator = torch.Generator(z.device).manual_seed(seed)
        fractions = torch.linspace(0, 1, didi.rollout_steps + 1, dtype=torch.float64)
        times = [1 + (tau - 1) * float(f) for f in fractions]
        log_prob = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        jumps = []
        for t, s in itertools.pairwise([*times, torch.zeros_like(tau)]):
            log_p = self._dense(self.student, z, t).double()
            alpha_s = torch.where(s > 0, self.schedule.alpha(s), 1.0)[:, None]
            law = posterior(z, log_p.exp(), alpha_s, self.schedule.alpha(t)[:, None], self.mask_id)
            drawn = draw_dense(law, generator)
            where = (z == self.mask_id) & (drawn < log_p.shape[-1])
            token = torch.where(where, drawn, 0)
            own = log_p.gather(-1, token[..., None]).squeeze(-1)
            log_prob = log_prob + torch.where(where, own, 0.0).sum(1)
            jumps.append(Jump(z, t, torch.arange(len(z), device=z.device), where))
            z = torch.where(where, token, z)
        return Rollout(z, tuple(jumps), log_prob, written)

    @torch.no_grad()
    def _dense(self, host: Host, z: Tensor, t: Tensor) -> Tensor:
        """Log-probabilities (B, L, V), float32, without gradient."""
        return host.run(lambda network: {"log_p": self._law(network, z, t)})["log_p"]

    def _law(self, network: DiT, z: Tensor, t: Tensor) -> Tensor:
        logits: Tensor = network(z, self.schedule.sigma(t))
        return logits.float().log_softmax(-1)

    def _scores(self, part: Compared, sync: bool) -> Tensors:
        didi, x = self.config.didi, part.rollout.x
        jumps = part.rollout.jumps if didi.score_steps == "all" else part.rollout.jumps[-1:]
        states = [(jump.z[jump.owner], jump.t[jump.owner]) for jump in jumps]
        laws: list[Tensor | None] = [None] * len(jumps)
        if didi.regularisation:
            laws = [self._dense(self.teacher_host, *state) for state in states]

        def forward(network: DiT) -> Tensors:
            log_prob = torch.zeros(len(x), dtype=torch.float64, device=x.device)
            total_kl, total_entropy = torch.zeros_like(log_prob), torch.zeros_like(log_prob)
            for jump, (z, t), law in zip(jumps, states, laws, strict=True):
                log_p = self._law(network, z, t)
                masked = z == self.mask_id
                own = log_p.gather(-1, x[..., None]).squeeze(-1)
                log_prob = log_prob + torch.where(jump.where, own, 0.0).double().sum(1)
                total_entropy = total_entropy + _means(entropy(log_p), masked)
                if law is not None:
                    total_kl = total_kl + _means(divergence(didi.kl, law, log_p), masked)
            return {"log_prob": log_prob, "kl": total_kl, "entropy": total_entropy / len(jumps)}

        scores = self.student.run(forward, sync=sync)
        if didi.log_prob == "mean":
            tokens = torch.stack([jump.where.sum(1) for jump in jumps]).sum(0)
            scores["log_prob"] = scores["log_prob"] / tokens.clamp(min=1)
        return scores


def _means(values: Tensor, masked: Tensor) -> Tensor:
    """Mean over the masks of each text: (B, L) -> (B,)."""
    total = torch.where(masked, values, 0.0).double().sum(1)
    return total / masked.sum(1).clamp(min=1)


def distill_case(
    name: str, kind: type[DidiTask], network: DiT, batch: int, length: int, world: World, *,
    bf16: bool, compile: Compile,
) -> Case:  # fmt: skip
    """One iteration from random reference texts; the networks are copies of one."""
    config = DistillConfig(
        # Both networks learn in every iteration, whatever the texts are.
        discriminator=DiscriminatorConfig(
            chance=0.0,
            saturation=1.0,
            trainable_blocks=min(4, network.config.layers),
        ),
        train=TrainConfig(
            steps=LAST,
            batch_size=batch,
            micro_batch=batch,
            precision="bf16" if bf16 else "fp32",
            compile=compile,
        ),
    )
    student, teacher_network = copy.deepcopy(network), copy.deepcopy(network)
    for twin in (student, teacher_network):
        twin.unfold()  # what is folded for sampling is of no use to what learns
    teacher = Teacher(network=teacher_network, tokenizer=None, fingerprint="")

    def references(start: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(start)
        shape = (count, length)
        return torch.randint(network.config.num_tokens, shape, generator=generator)

    task = kind(config, teacher, student, world, references=references)
    counter = itertools.count(FIRST)

    def run(_: int) -> Tensors:
        return [task.step(next(counter)) for _ in range(TOGETHER)][-1]

    return Case(
        name=name, run=run, batch=batch, length=length, steps=TOGETHER, batches=TOGETHER,
        networks=(teacher.network, *task.networks()),
    )  # fmt: skip
