"""Few-step students of a teacher of proteins at equal minutes: DiDi-Instruct and its rivals.

    python experiments/proteins.py teachers --fasta train.fasta --held valid.fasta --out proteins
    python experiments/proteins.py students --minutes 1 (the same)
    python experiments/proteins.py table (the same)

`teachers` trains `protein-teacher` and the left-to-right judge `protein-ar`; `students` measures
how fast each method learns on this machine, then trains each for so many minutes, with two seeds;
`table` draws from all of them and measures what needs no fold, beside real and shuffled chains.
What is finished stays: the same command goes on. `--at-once` runs so many trainings or
measurements beside each other; the iterations of a student are those that fill its minutes alone.
`--tiny` makes everything small, to see that it runs, or for a CPU (`--tiny cpu`: what two cores
train in an hour).
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from didi_instruct.reproduce.minutes import STUDENT, rate_of, schedule
from didi_instruct.reproduce.scale import Training

SHAPES = {
    "": ("model.length=256",),
    "cpu": ("model.layers=4", "model.hidden=128", "model.heads=4", "model.length=128"),
    "test": ("model.layers=1", "model.hidden=32", "model.heads=2", "model.length=48"),
}
GPU = (
    "train.batch_size=128", "train.pass_tokens=16384", "train.ema=0.999", "train.eval_every=0",
    "optim.warmup=300",
)  # fmt: skip
PRETRAINING = {
    "": {
        "protein-teacher": ("train.steps=6000", *GPU),
        "protein-ar": ("train.steps=2500", *GPU),
    },
    "cpu": dict.fromkeys(
        ("protein-teacher", "protein-ar"),
        (
            "train.steps=5000", "train.batch_size=64", "train.pass_tokens=4096", "train.ema=0.999",
            "train.eval_every=1000", "train.eval_sequences=256", "optim.lr=2e-3",
            "optim.warmup=200",
        ),
    ),
    "test": dict.fromkeys(
        ("protein-teacher", "protein-ar"),
        (
            "train.steps=20", "train.batch_size=8", "train.pass_tokens=512", "train.ema=0.9",
            "train.eval_every=0", "train.eval_sequences=8", "optim.warmup=2",
        ),
    ),
}  # fmt: skip
LENGTHS = {"": "100,200", "cpu": "60,120", "test": "24"}
"""At which sequences are compared. Students learn the teacher's own law of lengths, which path KL
needs: the judge gives no probability to a chain whose length it was not told."""
RATES = {
    "didi": ("optim.lr=1e-4", "discriminator.lr=3e-5", "discriminator.warmup=50"),
    "token-matching": ("optim.lr=2e-4", "token_matching.aux_lr=5e-4", "token_matching.warmup=20"),
    "sdtt": ("optim.lr=1e-4", "sdtt.steps=128"),
    "dimo": ("optim.lr=2e-4", "dimo.aux_lr=1e-3"),
    "mixture": ("optim.lr=5e-4",),
}
"""Those of the small scale on stories, for teachers of this size; the recipes have DPLM's."""
COMMON = (
    "train.batch_size=32",
    "train.ema=0.98",
    "train.eval_every=0",
    "train.save_every=1000000",
    "watch.budgets=[]",
)
BANKED = ("reference.source=bank", "reference.rows=4096", "reference.steps=64")
FEW = ("reference.rows=64", "reference.steps=4", "train.batch_size=8")
STEPS = "4,8,16,32,64"
OF_LAW = "ppl,entropy,path-kl,c2st"
"""Of chains of the lengths that a model draws, beside held-out ones."""
OF_CHAINS = "clusters,repeats,composition"
"""Of 40 chains of each length, as in the paper, beside held-out ones."""
NOVELTY_STEPS = "8,32"
"""Budgets whose chains are searched for among those of training."""


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=("teachers", "students", "table"))
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--held", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num", type=int, default=256, help="chains of a cell")
    parser.add_argument("--at-once", type=int, default=1, help="students or tables")
    parser.add_argument("--tiny", choices=tuple(SHAPES), default="")
    given = parser.parse_args()
    {"teachers": teachers, "students": students, "table": table}[given.stage](given)


def didi(*arguments: str) -> None:
    """Run a command; stop where it fails."""
    print("didi", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "didi_instruct", *arguments], check=True)


def trained(out: Path, verb: str, recipe: str, *more: str, settings: tuple[str, ...]) -> None:
    """Train what is not there yet."""
    if (out / "model.safetensors").is_file():
        return
    resume = ["--resume"] if out.is_dir() else []
    overrides = [word for setting in settings for word in ("--set", setting)]
    didi(verb, recipe, *more, *overrides, "--out", str(out), *resume)


def teachers(given: argparse.Namespace) -> None:
    """Train the teacher and the judge on windows of one data set."""
    shape = SHAPES[given.tiny]
    length = next((s.split("=")[1] for s in shape if s.startswith("model.length")), "512")
    data = given.out / "data"
    if not data.is_dir():
        words = ("--tokenizer", "esm", "--rows", "document", "--long", "drop")
        didi("data", "prepare", given.fasta, *words, "--length", length, "--out", str(data))
    for recipe in ("protein-teacher", "protein-ar"):
        settings = (f"data.source={data}", *shape, *PRETRAINING[given.tiny][recipe])
        trained(given.out / recipe, "pretrain", recipe, settings=settings)


def students(given: argparse.Namespace) -> None:
    """Measure paces, then train every method for so many minutes with each seed."""
    teacher = given.out / "protein-teacher"
    wanted = []
    for method, rates in RATES.items():
        training = Training(f"protein-{method}", settings_of(given, method, rates))
        steps = int(60 * given.minutes * pace(given, training, teacher))
        for seed in range(given.seeds):
            settings = (*training.overrides, *schedule(training, steps), f"train.seed={seed}")
            wanted.append((given.out / f"{method}-{seed}", training.recipe, settings))
    with ThreadPoolExecutor(given.at_once) as pool:
        list(
            pool.map(
                lambda one: trained(
                    one[0], "distill", one[1], "--teacher", str(teacher), settings=one[2]
                ),
                wanted,
            )
        )


def settings_of(given: argparse.Namespace, method: str, rates: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides of a method's recipe."""
    found = (*COMMON, "lengths=''", *rates)
    if method in ("didi", "sdtt", "mixture"):
        found = (*found, *BANKED, f"reference.bank={given.out / 'bank'}")
    if method == "didi":
        blocks = {"": 4, "cpu": 2, "test": 1}[given.tiny]
        found = (*found, f"discriminator.trainable_blocks={blocks}", "discriminator.lr_warmup=20")
    return (*found, *FEW) if given.tiny == "test" else found


def pace(given: argparse.Namespace, training: Training, teacher: Path) -> float:
    """Iterations a second of a short run, which is kept."""
    run = given.out / "paces" / training.recipe
    brief = tuple(s for s in STUDENT if not s.startswith("duo"))
    settings = (*training.overrides, *brief, "optim.warmup=2")
    trained(run, "distill", training.recipe, "--teacher", str(teacher), settings=settings)
    return rate_of(run)


def table(given: argparse.Namespace) -> None:
    """Measure the teacher by both samplers, and every student, beside real and shuffled chains."""
    out = given.out / "tables"
    out.mkdir(exist_ok=True)
    lines = [
        ("teacher", "protein-teacher", "ancestral"),
        ("teacher-dplm", "protein-teacher", "dplm"),
    ]
    lines += [
        (f"{method}-{seed}", f"{method}-{seed}", "dimo" if method == "dimo" else "ancestral")
        for seed in range(given.seeds)
        for method in RATES
    ]
    few = given.tiny == "test"
    law = OF_LAW.replace(",c2st", "") if few else OF_LAW
    steps, lengths = "4,8" if few else STEPS, LENGTHS[given.tiny]
    questions = {
        "law": (
            "--steps", steps, "--num", "8" if few else str(given.num), "--metrics", law,
            "--judge", str(given.out / "protein-ar"), "--reference", given.held,
        ),
        "chains": (
            "--steps", steps, "--lengths", lengths, "--metrics", OF_CHAINS,
            "--reference", given.held,
        ),
        "novelty": (
            "--steps", "8" if few else NOVELTY_STEPS, "--lengths", lengths, "--metrics", "novelty",
            "--reference", given.fasta,
        ),
    }  # fmt: skip

    def measure(one: tuple[str, str, str, str]) -> None:
        what, name, model, sampler = one
        found = out / f"{name}-{what}.json"
        if not found.is_file():
            where = ("--out", str(out / "evals"), "--json", str(found), "--seed", "0")
            model = str(given.out / model)
            didi("eval", model, "--sampler", sampler, *questions[what], *where)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(measure, [(what, *line) for what in questions for line in lines]))


if __name__ == "__main__":
    main()
