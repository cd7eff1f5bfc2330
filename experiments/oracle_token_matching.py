"""Token-level matching on the oracle language: how much of the few-step gap it closes.

    python experiments/oracle_token_matching.py --out DIR [--minutes 8] [--device cuda]

Trains a teacher on the oracle language, then students by token-matching under several settings, and
measures each by exact path KL (nats per sequence) against the teacher's best temperature or top-p
at the same steps. A prototype: it answers a question before the method is built properly.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from didi_instruct.config.pretrain import PretrainConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.network import NetworkDenoiser
from didi_instruct.training.distributed import World
from didi_instruct.training.pretrain_task import PretrainTask

SCHEDULE = LogLinear(0.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One student."""

    name: str
    budgets: tuple[int, ...] = (4, 8)
    iterations: int = 1500
    batch: int = 512
    lr: float = 2e-4
    aux_lr: float = 5e-4
    aux_steps: int = 2
    anchor: float = 0.0
    """Weight of KL(teacher ‖ student) at the state the student sees."""
    clip: float = 5.0
    warmup: int = 100
    """Iterations in which only the auxiliary model learns."""
    seed: int = 0


def train_teacher(device: torch.device, steps: int, batch: int, layers: int) -> DiT:
    """Pretrain the oracle recipe, larger and longer."""
    overrides = [f"train.steps={steps}", f"train.batch_size={batch}", f"model.layers={layers}"]
    overrides += ["train.precision=fp32", "train.compile=off", "train.ema=0.999"]
    config = load_recipe(PretrainConfig, "oracle-teacher", overrides)
    source = OracleSource(OracleLanguage.default())
    task = PretrainTask(config, config.model.resolve(64), source, World(device))
    for step in range(steps):
        task.step(step)
    task.updater.ema.copy_to(task.model)
    return task.model.eval().requires_grad_(False)


def path_kl(
    model: DiT, language: OracleLanguage, steps: int, num: int, **draw: float
) -> dict[str, float]:
    """Exact path KL, -log p, mistakes and variety of samples."""
    device = next(model.parameters()).device
    model.eval()
    denoiser = NetworkDenoiser(model, SCHEDULE)
    canvas = Canvas.blank(num, 32, 64, device=device)
    drawn = ancestral(denoiser, SCHEDULE, canvas, steps=steps, settings=Draw(seed=7, **draw))
    tokens = drawn.tokens.cpu()
    log_p = language.log_prob(tokens)
    gap = drawn.log_prob.cpu() - log_p
    return {
        "steps": steps, "path_kl": gap.mean().item(), "se": gap.std().item() / num**0.5,
        "nats": -log_p.mean().item(), "mistakes": language.mistakes(tokens).any,
        "latent_entropy": language.latent_entropy(tokens), **draw,
    }  # fmt: skip


@torch.no_grad()
def rollout(student: DiT, batch: int, budget: int, stop: int, generator: torch.Generator) -> Tensor:
    """The student's own state after `stop` of `budget` steps, (batch, 32)."""
    device = next(student.parameters()).device
    z = torch.full((batch, 32), 64, device=device)
    for n in range(stop):
        reveal = reveals(z, budget, n, generator)
        token = sample(student(z), generator)
        z = torch.where(reveal, token, z)
    return z


def reveals(z: Tensor, budget: int, n: int, generator: torch.Generator) -> Tensor:
    """Which masks step n of a uniform grid reveals."""
    chance = 1 / (budget - n)
    coins = torch.rand(z.shape, generator=generator, device=z.device)
    return (z == 64) & (coins < chance)


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token everywhere."""
    p = logits.double().softmax(-1).flatten(0, 1)
    return torch.multinomial(p, 1, generator=generator).view(logits.shape[:-1])


def distil(teacher: DiT, settings: Settings, report: Callable[[str], None]) -> DiT:
    """Token-matching: student and auxiliary start from the teacher."""
    device = next(teacher.parameters()).device
    generator = torch.Generator(device).manual_seed(settings.seed)
    student = copy.deepcopy(teacher).requires_grad_(True)
    auxiliary = copy.deepcopy(teacher).requires_grad_(True)
    optimizer = torch.optim.AdamW(student.parameters(), settings.lr, weight_decay=0.0)
    aux_optimizer = torch.optim.AdamW(auxiliary.parameters(), settings.aux_lr, weight_decay=0.0)
    average = copy.deepcopy(teacher)
    started = time.monotonic()
    for iteration in range(settings.warmup + settings.iterations):
        for k in range(settings.aux_steps):
            budget = settings.budgets[iteration % len(settings.budgets)]
            n = int(torch.randint(budget, (1,), generator=generator, device=device))
            z = rollout(student, settings.batch, budget, n, generator)
            reveal = reveals(z, budget, n, generator)
            train_student = k == settings.aux_steps - 1 and iteration >= settings.warmup
            with torch.set_grad_enabled(train_student):
                logits = student(z)
            token = sample(logits.detach(), generator)
            share = torch.rand(len(z), 1, generator=generator, device=device)
            shown = torch.rand(z.shape, generator=generator, device=device) < share
            context = torch.where(reveal & shown, token, z)
            hidden = reveal & ~shown
            aux_logits = auxiliary(context)
            aux_loss = F.cross_entropy(aux_logits[hidden], token[hidden])
            aux_optimizer.zero_grad()
            aux_loss.backward()
            aux_optimizer.step()
            if train_student:
                with torch.no_grad():
                    ratio = aux_logits.log_softmax(-1) - teacher(context).log_softmax(-1)
                    ratio = ratio.clamp(-settings.clip, settings.clip)[hidden]
                loss = (logits[hidden].softmax(-1) * ratio).sum(-1).mean()
                if settings.anchor:
                    reference = teacher(z)[reveal].log_softmax(-1)
                    loss = loss + settings.anchor * F.kl_div(
                        logits[reveal].log_softmax(-1),
                        reference,
                        reduction="batchmean",
                        log_target=True,
                    )
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                for group in optimizer.param_groups:
                    done = (iteration - settings.warmup) / settings.iterations
                    group["lr"] = settings.lr * min(1.0, 2 * (1 - done))
                optimizer.step()
                with torch.no_grad():
                    for a, p in zip(average.parameters(), student.parameters(), strict=True):
                        a.lerp_(p, 0.01)
    report(f"{settings.name}: {time.monotonic() - started:.0f} s")
    return average


def plan_of(iterations: int, only: str | None) -> list[Settings]:
    """Students to train, all or some of them by name."""
    base = Settings(name="base", iterations=iterations)
    students = [
        base,
        replace(base, name="aux x4", aux_steps=4),
        replace(base, name="anchor 0.1", anchor=0.1),
        replace(base, name="budget 4 only", budgets=(4,)),
        replace(base, name="lr 4e-4", lr=4e-4, aux_lr=1e-3),
        replace(base, name="seed 1", seed=1),
        replace(base, name="long", iterations=3 * iterations, aux_steps=3),
        replace(base, name="long, anchor 0.03", iterations=3 * iterations, anchor=0.03, seed=2),
    ]
    return [s for s in students if only is None or s.name in only.split(";")]


def main() -> None:
    """Teacher, controls, students; a table, and JSON after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--teacher-steps", type=int, default=4000)
    parser.add_argument("--teacher-batch", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--only", help="Names of settings, separated by semicolons.")
    a = parser.parse_args()
    device, language = torch.device(a.device), OracleLanguage.default()
    started, rows = time.monotonic(), []

    def row(name: str, **facts: object) -> None:
        rows.append({"name": name, **facts})
        (a.out / "rows.json").write_text(json.dumps(rows, indent=1))
        print(f"{time.monotonic() - started:5.0f} s  {name:34}", {
            k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()
        }, flush=True)  # fmt: skip

    teacher = train_teacher(device, a.teacher_steps, a.teacher_batch, a.layers)
    row("teacher trained", seconds=time.monotonic() - started)
    for steps in (4, 8, 16, 32, 128):
        row("teacher", **path_kl(teacher, language, steps, a.samples))
    for steps in (4, 8):
        for draw in ({"temperature": t} for t in (0.95, 0.9, 0.8, 0.7, 0.6)):
            row("teacher", **path_kl(teacher, language, steps, a.samples, **draw))
        for top_p in (0.98, 0.95, 0.9, 0.8):
            row("teacher", **path_kl(teacher, language, steps, a.samples, top_p=top_p))
    for settings in plan_of(a.iterations, a.only):
        if time.monotonic() - started > 60 * a.minutes:
            break
        student = distil(teacher, settings, lambda text: print(text, flush=True))
        for steps in (2, 4, 8, 16, 32):
            facts = path_kl(student, language, steps, a.samples)
            row(settings.name, **facts, settings=asdict(settings))
        for steps in (4, 8):
            facts = path_kl(student, language, steps, a.samples, temperature=0.9)
            row(settings.name, **facts, settings=settings.name)


if __name__ == "__main__":
    main()
