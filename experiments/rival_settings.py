"""Other settings of every rival's training: as many steps as in the table, on the same terms.

    python experiments/rival_settings.py --data prepared --judge stories15m --out OUT --minutes 1

`OUT` is the folder of `didi reproduce baselines`, whose students are found there and not trained
again; beside them stand the same with one setting changed. What is compared is path KL, where the
method has one, and vsF, where `OUT` has the teacher's sweep. `--write-only` tells what has finished
there and trains nothing. `--scale toy` needs neither data nor judge, to see that it runs; nor does
`--scale oracle`, the oracle language on a CPU (rivals.py), whose rows say what the language says of
them.
"""

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rivals import ORACLE, Told, foretold, paced, table_jobs, truth

from didi_instruct.evaluation.frontier import Point, log_vsf
from didi_instruct.evaluation.measuring import plain
from didi_instruct.evaluation.training_curves import read_log
from didi_instruct.reproduce.asking import ALL_TRICKS
from didi_instruct.reproduce.baselines_compared import BASELINE
from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.measuring import quality_job
from didi_instruct.reproduce.running import RUN, finished, folder_of
from didi_instruct.reproduce.scale import Scale

STORIES = {
    "sdtt": (
        "optim.lr=3e-5",
        "sdtt.steps=64",
        "sdtt.divergence=forward",
        "optim.lr=3e-4",
        "optim.lr=1e-3",
    ),
    "dimo": (
        "dimo.random=0.7",
        "optim.lr=5e-4",
        "dimo.beta=-0.2",
        "optim.lr=5e-5 dimo.aux_lr=2e-4",
        "dimo.aux_lr=2e-4",
    ),
    "duo": ("optim.lr=5e-4", "optim.lr=1e-4", "duo.steps=32", "duo.kl=forward"),
    "didi": (
        "discriminator.saturation=1.0",
        "optim.lr=1e-5",
        "discriminator.lr=1e-4",
        "optim.lr=1e-4",
        "optim.lr=3e-4",
    ),
    "jump": ("didi.kl_weight=0.01", "optim.lr=3e-5", "optim.lr=3e-4"),
    "path": ("optim.lr=1e-3", "optim.lr=2e-4"),
    "token-matching": ("token_matching.anchor=0.5",),
    "duo-teacher": ("curriculum.steps=3500",),
}
"""Overrides beside what the table has, a student for each line; those that nobody has measured come
first (docs/log.md)."""
ON_ORACLE = {
    "sdtt": ("optim.lr=1e-4", "optim.lr=1e-3", "sdtt.steps=16", "sdtt.divergence=forward"),
    "dimo": ("optim.lr=3e-4", "dimo.beta=-0.2", "dimo.random=0.7", "dimo.aux_lr=1e-3"),
    "duo": ("optim.lr=2e-4", "optim.lr=1e-3", "duo.steps=32", "duo.kl=forward"),
    "didi": ("optim.lr=3e-4", "discriminator.lr=1e-3"),
    "jump": ("optim.lr=3e-4",),
    "token-matching": ("token_matching.anchor=0.2",),
}
USUAL = ""
SAMPLERS = {"dimo": "dimo"}
WITHOUT_PATH_KL = ("duo", "duo-teacher")
LONG = ("duo-teacher",)
"""Trained for minutes, so only where they are asked for."""
TOLD = ("ppl", "ppl_ci95", "entropy", "path_kl", "path_kl_ci95", "unique_4gram", "num_samples")


def students(
    scale: Scale, tried: dict[str, tuple[str, ...]], seed: int
) -> dict[tuple[str, str], Job]:
    """Every student by role and changed setting, roles in turns: a first answer about all first."""
    found = {}
    for number in range(1 + max(map(len, tried.values()))):
        for role in tried:
            changes = (USUAL, *tried[role])
            if number < len(changes):
                found[role, changes[number]] = _student(scale, role, changes[number], seed)
    return found


def _student(scale: Scale, role: str, change: str, seed: int) -> Job:
    usual = scale.rival(ALL_TRICKS, seed) if role == "didi" else scale.model(role, seed)
    if change == USUAL:
        return usual
    words = re.sub("[=_ ]", "-", change).removeprefix(f"{role}.")
    name = f"{role}-{words}-seed{seed}"
    return replace(usual, name=name, overrides=(*usual.overrides, *change.split()))


def measure(scale: Scale, role: str, student: Job, seed: int) -> Job:
    """Its rows at the budgets it is made for."""
    steps = [*scale.few, *scale.budgets][:3] if role == "dimo" else scale.budgets
    metrics = ["ppl", "entropy", "unique-4gram"]
    return quality_job(
        scale,
        f"measure-{student.name}",
        student,
        steps=steps,
        seed=seed,
        metrics=metrics if role in WITHOUT_PATH_KL else [*metrics, "path-kl"],
        sampler=SAMPLERS.get(role),
    )


def run(jobs: list[Job], asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Rows of each job, by its key; those that failed are named and left out."""
    if asked.write_only:
        found = {job.key: finished(job, asked.out) for job in jobs}
        return {key: done.result for key, done in found.items() if done}
    grid = Grid(jobs, asked.out, board=Told())
    grid.run(["0"] * asked.at_once if asked.scale != "toy" else ())
    for failure in grid.failures:
        print(f"{failure.job.name} failed: {failure.note}")
    return dict(grid.results)


def frontiers(scale: Scale, out: Path) -> dict[int, list[Point]]:
    """The baseline's sweep of each seed, as far as it is there."""
    found: dict[int, list[Point]] = {}
    for job in table_jobs(scale, out):
        done = finished(job, out) if job.options.get("method") == BASELINE else None
        for row in done.result if done else ():
            found.setdefault(row["seed"], []).append(Point.of(row))
    return found


def _place(folder: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells samples of a folder apart here."""
    options = json.dumps(row["options"], sort_keys=True)
    told = ("sampler", "nfe", "temperature", "top_p", "seed")
    return (folder, options, *(row[name] for name in told))


def main() -> None:
    """Train, measure, and print a line for each student and budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", default="small")
    parser.add_argument("--data")
    parser.add_argument("--judge")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="of every student, as the table's were made")
    parser.add_argument("--rivals", type=lambda words: words.split(","), help="of didi reproduce")
    parser.add_argument("--roles", help="these alone, with commas between them")
    parser.add_argument("--most", type=int, help="so many changes of each, the first ones")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-mauve", action="store_false", dest="mauve")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--write-only", action="store_true", help="of what has finished in --out")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    scale = foretold(asked) if asked.write_only else paced(asked)
    changes = ON_ORACLE if asked.scale == ORACLE else STORIES
    known = [r for r in changes if r == "didi" or (scale.has(r) and r not in LONG)]
    roles = asked.roles.split(",") if asked.roles else known
    tried = {role: changes[role][: asked.most] for role in roles}
    trained = {
        (*which, seed): student
        for seed in scale.seeds
        for which, student in students(scale, tried, seed).items()
    }
    measured = {
        (role, change, seed): measure(scale, role, student, seed)
        for (role, change, seed), student in trained.items()
    }
    results, baselines = run([*measured.values()], asked), frontiers(scale, asked.out)
    facts = {}
    if asked.scale == ORACLE:
        facts = {_place(fact["model"], fact): fact for fact in truth(asked.out)}
    found = []
    for which, job in measured.items():
        if job.key not in results:
            continue
        log = folder_of(trained[which], asked.out) / RUN / "log.jsonl"
        records = read_log(log) if log.exists() else []
        waits = [round(record["disc_waits"], 2) for record in records if "disc_waits" in record]
        role, change, seed = which
        folder = folder_of(trained[which], asked.out).name
        for row in results[job.key]:
            told = {name: row.get(name) for name in TOLD}
            line = {"role": role, "changed": change, "seed": seed, "nfe": row["nfe"], **told}
            equals = [p for p in baselines.get(row["seed"], ()) if p.nfe == row["nfe"]]
            line |= {"vsf": plain(math.exp(log_vsf(Point.of(row), equals)[0]))}
            fact = facts.get(_place(folder, row), {})
            line |= {name: fact[name] for name in ("mistakes", "latent_share") if fact}
            found.append(line | ({"waits": waits} if waits else {}))
            print(json.dumps(line))
    name = "-".join(["settings", *(asked.roles or "").split(",")]).strip("-")
    (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
