"""Distillation on the oracle language: settings and seeds against the teacher's best sampling.

    python experiments/oracle_distillation.py teacher --out DIR [--set KEY=VALUE ...]
    python experiments/oracle_distillation.py controls --out DIR
    python experiments/oracle_distillation.py student NAME SEED --out DIR
    python experiments/oracle_distillation.py all --out DIR --names a,b --seeds 0,1,2 --jobs 6
    python experiments/oracle_distillation.py table --out DIR

Every part writes JSON into DIR, so that `table` can be asked at any time. Path KL is exact, in nats
per sequence; differences from the teacher's best temperature or top-p are paired, since all draws
share their reveal orders and uniforms.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from didi_instruct.api.distill import distill
from didi_instruct.api.model import load
from didi_instruct.api.pretrain import pretrain
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.evaluation.paths import gap_closed, paired_difference
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw, join
from didi_instruct.sampling.network import NetworkDenoiser

BUDGETS = (2, 4, 8, 16, 32)
CONTROLS = (
    [{"temperature": t} for t in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)]
    + [{"top_p": p} for p in (0.98, 0.95, 0.9)]
    + [{"temperature": 0.95, "top_p": 0.98}, {"temperature": 0.9, "top_p": 0.98}]
)
SEED, CHUNK = 7, 1024

TM = ["token_matching.contexts=1", "token_matching.completion=0", "token_matching.anchor=0.1"]
PAPER = [
    "didi.rollout_steps=1", "didi.score_steps=all", "didi.grouping=batch", "didi.scale=group",
    "discriminator.trainable_blocks=1", "discriminator.label_smoothing=0.1",
]  # fmt: skip
SETTINGS = {
    "tm": TM,
    "tm-no-anchor": [*TM, "token_matching.anchor=0"],
    "tm-anchor-0.03": [*TM, "token_matching.anchor=0.03"],
    "tm-anchor-0.3": [*TM, "token_matching.anchor=0.3"],
    "tm-budget-4": [*TM, "token_matching.budgets=[4]"],
    "tm-budgets-2-4": [*TM, "token_matching.budgets=[2,4]"],
    "tm-aux-4": [*TM, "token_matching.aux_steps=4"],
    "tm-contexts-4": [*TM, "token_matching.contexts=4"],
    "tm-clip-2": [*TM, "token_matching.ratio_clip=2"],
    "tm-lr-5e-4": [*TM, "optim.lr=5e-4", "token_matching.aux_lr=1e-3"],
    "tm-lr-1e-4": [*TM, "optim.lr=1e-4"],
    "tm-recipe": [],
    "tm-completion-anchor-0.1": ["token_matching.anchor=0.1"],
    "didi": PAPER,
    "didi-paper": [*PAPER, "discriminator.lr=1e-4"],
    "didi-tau": [*PAPER, "didi.grouping=tau", "didi.group_size=16"],
    "didi-one-step": [*PAPER, "didi.score_decomposition=false"],
    "didi-jump": [],
    "didi-jump-kl-0.5": ["didi.kl_weight=0.5"],
    "didi-jump-loo": ["didi.baseline=leave-one-out"],
    "didi-jump-data": ["reference.source=data"],
    "didi-jump-disc-4": ["discriminator.steps=4"],
    "didi-jump-k8": ["didi.rollout_steps=8"],
    "didi-jump-group-32": ["didi.group_size=32"],
    "didi-jump-uncoupled": ["didi.coupled_time=false"],
}


def samples(folder: Path, steps: int, num: int, **draw: float) -> dict[str, object]:
    """Exact gaps log q(path) - log p(x) and what else the oracle says, of one sampler."""
    model, language = load(folder), OracleLanguage.default()
    denoiser = NetworkDenoiser(model.network, model.schedule)
    parts = []
    for first in range(0, num, CHUNK):
        canvas = Canvas.blank(min(CHUNK, num - first), 32, 64, first=first, device=model.device)
        settings = Draw(seed=SEED, **draw)
        parts.append(ancestral(denoiser, model.schedule, canvas, steps=steps, settings=settings))
    drawn = join(parts)
    tokens = drawn.tokens.cpu()
    gaps: Tensor = drawn.log_prob.cpu() - language.log_prob(tokens)
    share = language.latent_entropy(tokens) / language.true_latent_entropy()
    mistakes = language.mistakes(tokens).any
    return {"gaps": gaps, "latent": share, "mistakes": mistakes, **draw}


def controls(out: Path, num: int) -> None:
    """The teacher with every temperature and top-p, and with all its steps."""
    rows, best = [], {}
    for steps in BUDGETS:
        for draw in CONTROLS if steps in (4, 8) else [{"temperature": 1.0}]:
            found = samples(out / "teacher", steps, num, **draw)
            gaps = found.pop("gaps")
            row = {"steps": steps, **found, "path_kl": gaps.mean().item()}
            rows.append(row | {"se": gaps.std().item() / num**0.5})
            if steps not in best or row["path_kl"] < best[steps][0]:
                best[steps] = (row["path_kl"], draw, gaps)
    many = samples(out / "teacher", 128, num)["gaps"]
    rows.append({"steps": 128, "path_kl": many.mean().item(), "se": many.std().item() / num**0.5})
    facts = {str(s): {"path_kl": kl, "draw": draw} for s, (kl, draw, _) in best.items()}
    report = {"rows": rows, "best": facts, "many": many.mean().item(), "samples": num}
    (out / "controls.json").write_text(json.dumps(report, indent=1))
    save_file({str(s): gaps for s, (_, _, gaps) in best.items()}, out / "best_gaps.safetensors")


def student(out: Path, name: str, seed: int, num: int, extra: list[str]) -> None:
    """Distil one setting with one seed, and measure it."""
    recipe = "oracle-token-matching" if name.startswith("tm") else "oracle-didi"
    folder = out / f"{name}-seed{seed}"
    overrides = [*SETTINGS[name], f"train.seed={seed}", *extra]
    started = time.monotonic()
    distill(recipe, teacher=out / "teacher", out=folder, overrides=overrides)
    seconds = time.monotonic() - started
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    training = [line for line in log if "iterations_per_second" in line]
    report = json.loads((out / "controls.json").read_text())
    best = load_file(out / "best_gaps.safetensors")
    rows = []
    for steps in BUDGETS:
        for draw in [{}, {"temperature": 0.9}] if steps in (4, 8) else [{}]:
            found = samples(folder, steps, num, **draw)
            gaps = found.pop("gaps")
            difference, error = paired_difference(gaps, best[str(steps)])
            teacher = report["best"][str(steps)]["path_kl"]
            mean = gaps.mean().item()
            rows.append(
                {
                    "steps": steps, **found, "path_kl": mean, "se": gaps.std().item() / num**0.5,
                    "difference": difference, "difference_se": error,
                    "gap_closed": gap_closed(teacher, mean, report["many"]),
                }
            )  # fmt: skip
    facts = {
        "name": name, "seed": seed, "settings": overrides, "seconds": seconds, "rows": rows,
        "last": training[-1], "device": "cuda" if torch.cuda.is_available() else "cpu",
        "iterations_per_second": training[-1]["iterations_per_second"],
    }  # fmt: skip
    (out / f"{name}-seed{seed}.json").write_text(json.dumps(facts, indent=1))


def run_all(a: argparse.Namespace) -> None:
    """Several students at once, each in a process of its own."""
    waiting = [(name, seed) for seed in a.seeds.split(",") for name in a.names.split(",")]
    running: list[tuple[subprocess.Popen[bytes], str]] = []
    deadline = time.monotonic() + 60 * a.minutes
    while waiting or running:
        while waiting and len(running) < a.jobs and time.monotonic() < deadline:
            (name, _, steps), seed = waiting[0][0].partition("@"), waiting.pop(0)[1]
            command = [sys.executable, __file__, "student", name, seed, "--out", str(a.out)]
            settings = [*a.set, *([f"train.steps={steps}"] if steps else [])]
            command += ["--samples", str(a.samples), *(x for s in settings for x in ("--set", s))]
            log = (a.out / f"{name}-seed{seed}.log").open("wb")
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running.append((process, f"{name} {seed}"))
        if time.monotonic() >= deadline:
            waiting.clear()
            for process, _ in running:
                process.terminate()
        for process, label in [r for r in running if r[0].poll() is not None]:
            running.remove((process, label))
            print(f"{label}: exit {process.returncode}", flush=True)
        time.sleep(0.5)


def table(out: Path) -> None:
    """What there is so far, one line per student and temperature."""
    report = json.loads((out / "controls.json").read_text())
    print("teacher's best:", report["best"], "128 steps:", round(report["many"], 2))
    for row in report["rows"]:
        if row.get("temperature") == 1.0:
            print("teacher", {k: round(v, 3) for k, v in row.items()})
    for path in sorted(out.glob("*-seed*.json")):
        facts = json.loads(path.read_text())
        speed, last = facts["iterations_per_second"], facts["last"]
        print(
            f"{facts['name']} seed {facts['seed']}: {facts['seconds']:.0f} s, {speed:.1f} it/s",
            {k: round(last[k], 3) for k in ("disc_accuracy", "aux_kl", "kl_start") if k in last},
        )
        for t in (None, 0.9):
            cells = [
                f"{r['steps']}: {r['path_kl']:.2f} ({r['difference']:+.2f} ± "
                f"{r['difference_se']:.2f}, latent {r['latent']:.1%}, "
                f"mistakes {r['mistakes']:.1%}, closed {r['gap_closed']:.1%})"
                for r in facts["rows"]
                if r.get("temperature") == t
            ]
            print("   ", f"T={t or 1}", "  ".join(cells))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["teacher", "controls", "student", "all", "table"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--names", default=",".join(SETTINGS), help="NAME or NAME@ITERATIONS")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    match a.part:
        case "teacher":
            pretrain("oracle-teacher", out=a.out / "teacher", overrides=a.set)
        case "controls":
            controls(a.out, a.samples)
        case "student":
            student(a.out, a.name, a.seed, a.samples, a.set)
        case "all":
            run_all(a)
        case "table":
            table(a.out)


if __name__ == "__main__":
    main()
