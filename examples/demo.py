"""Train a tiny teacher where the truth is known, and say exactly how good its samples are.

`make demo` runs this. Everything goes through the public API, so it is also an example of it.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import didi_instruct as didi
from didi_instruct.data.oracle import OracleLanguage, OracleSource
from didi_instruct.training.reporting import TerminalReporter

STEPS = (1, 2, 4, 8, 16, 32, 64)


def train(out: Path, steps: int) -> Path:
    """Pretrain the teacher, or go on where an interrupted demo stopped."""
    teacher = out / "teacher"
    if (teacher / "config.json").exists():
        print(f"Using the teacher in {teacher} (delete the folder to train again)")
        return teacher
    result = didi.pretrain(
        "oracle-teacher",
        overrides=[f"train.steps={steps}", "train.save_every=200"],
        out=teacher,
        resume=(teacher / "recipe.yaml").exists(),
        reporter=TerminalReporter("teacher"),
    )
    if not result.finished:
        sys.exit("Stopped and saved; `make demo` goes on from there.")
    return teacher


def measure(model: didi.Model, language: OracleLanguage, steps: int, num: int) -> dict[str, float]:
    """Exact quality of samples: every number is computed, none is another model's opinion."""
    drawn = model.draw(num, steps=steps, seed=0, batch_size=256)
    log_p = language.log_prob(drawn.tokens)
    gap = drawn.log_prob - log_p
    return {
        "steps": steps,
        "nats": -log_p.mean().item(),
        "error": log_p.std().item() / num**0.5,
        "path_kl": gap.mean().item(),
        "path_kl_error": gap.std().item() / num**0.5,
        "mistakes": language.mistakes(drawn.tokens).any,
        "latent_entropy": language.latent_entropy(drawn.tokens),
    }


def truth(language: OracleLanguage, num: int) -> dict[str, float]:
    """The same numbers for true samples of the language."""
    tokens = language.sample(num, torch.Generator().manual_seed(1))
    log_p = language.log_prob(tokens)
    return {
        "nats": -log_p.mean().item(),
        "error": log_p.std().item() / num**0.5,
        "mistakes": language.mistakes(tokens).any,
        "latent_entropy": language.latent_entropy(tokens),
    }


def show(console: Console, rows: list[dict[str, float]], real: dict[str, float]) -> None:
    """Print the table."""
    table = Table(title="Samples of the teacher, scored exactly by the oracle")
    for heading in ("steps", "-log p (nats)", "path KL (nats)", "wrong sentences", "variety"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['steps']}",
            f"{row['nats']:.2f} ± {row['error']:.2f}",
            f"{row['path_kl']:.2f} ± {row['path_kl_error']:.2f}",
            f"{row['mistakes']:.1%}",
            f"{row['latent_entropy'] / real['latent_entropy']:.1%}",
        )
    table.add_row(
        "truth",
        f"{real['nats']:.2f} ± {real['error']:.2f}",
        "0",
        f"{real['mistakes']:.1%}",
        "100%",
    )
    console.print(table)


def plot(out: Path, rows: list[dict[str, float]], real: dict[str, float]) -> list[str]:
    """Draw the training curve and quality against steps, where matplotlib is installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return []
    log = [json.loads(line) for line in (out / "teacher" / "log.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["loss"]) for line in log if "loss" in line]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot(*zip(*curve, strict=True), lw=0.8, label="training loss")
    left.axhline(real["nats"] / 32, color="black", ls="--", lw=1, label="entropy of the language")
    left.set(xlabel="step", ylabel="nats per token", yscale="log")
    left.legend(frameon=False)
    steps = [row["steps"] for row in rows]
    right.plot(steps, [row["nats"] for row in rows], "o-", label="samples: -log p")
    right.axhline(real["nats"], color="black", ls="--", lw=1, label="true text")
    right.set(xlabel="sampling steps", ylabel="nats per sequence", xscale="log")
    right.set_xticks(steps, [str(s) for s in steps])
    right.minorticks_off()
    right.legend(frameon=False)
    figure.savefig(out / "quality.png", dpi=150)
    return ["![Training and sample quality](quality.png)", ""]


def report(
    out: Path, lines: list[str], rows: list[dict[str, float]], real: dict[str, float]
) -> None:
    """Write report.md, report.json and the picture."""
    body = ["# Demo: a teacher of the oracle language", "", *lines, "", *plot(out, rows, real)]
    body += ["| steps | -log p, nats | ± | path KL | wrong sentences | variety |", "|--:" * 6 + "|"]
    for row in [*rows, {"steps": "truth", "path_kl": 0.0, **real}]:
        body.append(
            f"| {row['steps']} | {row['nats']:.2f} | {row['error']:.2f} | {row['path_kl']:.2f} "
            f"| {row['mistakes']:.1%} | {row['latent_entropy'] / real['latent_entropy']:.1%} |"
        )
    body += [
        "",
        "Path KL is an upper bound of KL(sampler ‖ language); variety is the entropy of the "
        "latents behind the samples over that of as many true ones: below 100% is collapse.",
        "",
    ]
    (out / "report.md").write_text("\n".join(body), encoding="utf-8")
    numbers = {"rows": rows, "truth": real}
    (out / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Train, sample, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1024)
    arguments = parser.parse_args()
    started, out, console = time.monotonic(), arguments.out, Console()

    model = didi.load(train(out, arguments.train_steps))
    language = OracleLanguage.default()
    held_out = OracleSource(language, split="valid")
    bound = model.likelihood(held_out.ordered, sequences=4096, draws=4, batch_size=256)
    entropy, error = (value / language.length for value in language.entropy())
    low, high = (value / entropy - 1 for value in bound.ci95)
    lines = [
        f"NELBO {bound.nats_per_token:.4f} nats per token, entropy of the language {entropy:.4f} ± "
        f"{error:.4f}: {bound.nats_per_token / entropy - 1:+.1%} (95%: {low:+.1%} to {high:+.1%}).",
    ]
    console.print(lines[0])
    rows = [measure(model, language, steps, arguments.samples) for steps in STEPS]
    real = truth(language, arguments.samples)
    show(console, rows, real)
    for steps in (4, 64):
        text = model.generate(num=1, steps=steps, seed=3)[0]
        console.print(f"\n[bold]{steps} steps:[/bold] {text}", highlight=False, markup=True)
        lines += ["", f"{steps} steps: `{text}`"]
    report(out, lines, rows, real)
    console.print(f"\nReport: {out / 'report.md'}  ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
