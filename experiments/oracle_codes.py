"""What would a shared noise input add? A student whose every step is a mixture of products.

    python experiments/oracle_codes.py TEACHER --codes 64 --steps 2000 --out result.json

A few-step student of the usual kind draws the tokens of a step independently, so it cannot say that
two of them belong together. Here each step first draws a code c, one of K, uniformly, which all
positions see: q(x_S | z) = 1/K Σ_c Π_i q(x_i | z, c). A step can then win up to log K nats of what
independence costs, at the same number of passes. The likelihood of a step is exact (K passes, when
measuring only), so path KL is too.

The student begins as the teacher with small random code embeddings and learns by maximum
likelihood on true texts: the negative log of the mixture over the positions that a step reveals.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from didi_instruct.api.model import load
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.models.dit import DiT
from didi_instruct.training.optim import EMA

BUDGETS = (2, 4, 8, 16)
ROWS = 1 << 16
"""Texts in one pass while measuring, at most."""


class Student(nn.Module):
    """A denoiser that also sees a code, added to the embedding of every position (or mask)."""

    def __init__(self, network: DiT, codes: int, masks_only: bool = False) -> None:
        super().__init__()
        self.masks_only = masks_only
        self.network, self.codes = network, nn.Embedding(codes, network.config.hidden)
        nn.init.normal_(self.codes.weight, std=0.02 if codes > 1 else 0.0)

    def forward(self, z: Tensor, code: Tensor) -> Tensor:
        """Log-probabilities (B, L, V) for states (B, L) and codes (B,)."""
        added = self.codes(code)[:, None]
        if self.masks_only:
            added = added * (z == self.network.config.mask_id)[..., None]
        embeddings = self.network.embed(z) + added
        condition = self.network.condition()
        hidden = self.network.trunk(None, embeddings=embeddings)
        logits = self.network.head(hidden, condition, self.network.config.num_tokens)
        return logits.float().log_softmax(-1)


def step_log_likelihoods(
    model: Student, z: Tensor, x: Tensor, revealed: Tensor, sharpen: float = 1.0
) -> Tensor:
    """Log-probability of the revealed tokens under every code: (B, K)."""
    count = model.codes.num_embeddings
    found = []
    for part in torch.arange(len(z), device=z.device).split(max(1, ROWS // count)):
        rows = part.repeat_interleave(count)
        code = torch.arange(count, device=z.device).repeat(len(part))
        log_p = (model(z[rows], code) / sharpen).log_softmax(-1)
        token = log_p.gather(-1, x[rows][..., None]).squeeze(-1)
        found.append((token * revealed[rows]).sum(1).view(len(part), count))
    return torch.cat(found)


def loss_of(
    model: Student,
    x: Tensor,
    budgets: tuple[int, ...],
    mask_id: int,
    generator: torch.Generator,
    sampled: int = 0,
) -> Tensor:
    """Negative log-likelihood of a random step of a random budget, per revealed token.

    `sampled` codes per text are drawn from the posterior and learn; 0: all of them do.
    """
    device = x.device
    budget = torch.tensor(budgets, device=device)[
        torch.randint(len(budgets), (len(x),), generator=generator, device=device)
    ]
    done = (torch.rand(len(x), generator=generator, device=device) * budget).long()
    order = torch.rand(x.shape, generator=generator, device=device)
    low, high = (done / budget)[:, None], ((done + 1) / budget)[:, None]
    revealed = (order >= low) & (order < high)
    z = torch.where(order < low, x, torch.full_like(x, mask_id))
    if not sampled:
        each = step_log_likelihoods(model, z, x, revealed)
        return -(each.logsumexp(1) - math.log(each.shape[1])).sum() / revealed.sum()
    # The gradient of the log of a mixture is that of its parts, weighted by their posterior.
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        each = step_log_likelihoods(model, z, x, revealed)
    code = each.softmax(1).multinomial(sampled, replacement=True, generator=generator).flatten()
    rows = torch.arange(len(x), device=device).repeat_interleave(sampled)
    token = model(z[rows], code).gather(-1, x[rows][..., None]).squeeze(-1)
    own = -(token * revealed[rows]).sum() / sampled / revealed.sum()
    whole = -(each.logsumexp(1) - math.log(each.shape[1])).sum() / revealed.sum()
    return own + (whole - own).detach()


@torch.no_grad()
def measure(
    model: Student, language: OracleLanguage, steps: int, num: int, sharpen: float
) -> dict[str, float]:
    """Exact path KL of the mixture student, and what the oracle says of its texts."""
    device = model.codes.weight.device
    generator = torch.Generator(device).manual_seed(7)
    order = torch.rand(num, language.length, generator=generator, device=device)
    z = torch.full((num, language.length), language.mask_id, device=device)
    log_q = torch.zeros(num, dtype=torch.float64, device=device)
    joint = torch.zeros_like(log_q)
    count = model.codes.num_embeddings
    for k in range(steps):
        revealed = (order >= k / steps) & (order < (k + 1) / steps)
        code = torch.randint(count, (num,), generator=generator, device=device)
        log_p = (model(z, code) / sharpen).log_softmax(-1)
        uniform = torch.rand(log_p.shape, generator=generator, device=device, dtype=torch.float64)
        token = (log_p - torch.log(-torch.log(uniform.clamp_min(1e-300)))).argmax(-1)
        drawn = torch.where(revealed, token, z)
        each = step_log_likelihoods(
            model, z, drawn.clamp(max=log_p.shape[-1] - 1), revealed, sharpen
        )
        log_q += each.double().logsumexp(1) - math.log(count)
        joint += each.gather(1, code[:, None]).squeeze(1)
        z = drawn
    tokens = z.to(language.device)
    log_p = language.log_prob(tokens).to(device)
    gaps = log_q - log_p
    true = language.sample(num, torch.Generator().manual_seed(0))
    return {
        "steps": steps,
        "temperature": sharpen,
        "path_kl": gaps.mean().item(),
        "se": gaps.std().item() / num**0.5,
        "used": (joint - log_q).mean().item(),
        "latent": language.latent_entropy(tokens) / language.latent_entropy(true),
        "mistakes": float(language.mistakes(tokens).any),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--sampled", type=int, default=0)
    parser.add_argument("--masks-only", action="store_true")
    parser.add_argument("--budgets", default="4,8")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--num", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    language = OracleLanguage.default().to(device)
    network = copy.deepcopy(load(args.teacher, device=device).network)
    assert isinstance(network, DiT)
    network.unfold()
    model = Student(network.train(), args.codes, args.masks_only).to(device).requires_grad_(True)
    ema = EMA(model, 0.995)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    generator = torch.Generator(device).manual_seed(args.seed)
    words = torch.Generator(device).manual_seed(1000 + args.seed)
    budgets = tuple(int(part) for part in args.budgets.split(","))
    started, history = time.time(), []
    for step in range(args.steps):
        x = language.sample(args.batch, words)
        optimizer.param_groups[0]["lr"] = (
            args.lr * min(1, (step + 1) / 100) * (1 - step / args.steps)
        )
        loss = loss_of(model, x, budgets, language.mask_id, generator, args.sampled)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(step)
        if step % 100 == 0 or step == args.steps - 1:
            history.append((step, loss.item()))
            print(f"{step} {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
    ema.copy_to(model)
    model.eval()
    result = {
        "settings": {k: str(v) for k, v in vars(args).items()},
        "history": history,
        "rows": [],
    }
    for steps in BUDGETS:
        for sharpen in (1.0, 0.9, 0.8):
            row = measure(model, language, steps, args.num, sharpen)
            result["rows"].append(row)
            print(args.codes, {k: round(v, 3) for k, v in row.items()}, flush=True)
            args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
