"""What `didi reproduce baselines --scale small` trains, in as little time as one GPU needs for it.

    python experiments/rivals.py compile --data prepared --judge stories15m --out OUT --minutes 1
    python experiments/rivals.py train   (the same)
    python experiments/rivals.py draw    (the same)
    didi reproduce baselines --scale small --data prepared --judge stories15m ... --out OUT

`compile` runs a few steps of every training that a result waits for, all beside each other, and
throws them away: what they compiled stays in the compiler's cache, so that paces and trainings
after it do not wait for it.
`train` measures paces and trains one after the other, in one process, DUO's models last, without
those that no result waits for. `draw` draws and judges, `--at-once` processes beside each other and
beside whatever else runs: all that the table needs but speeds; with `--untrained` of the teacher
alone, for which nothing has to be trained. The table then finds all of them.
`--scale toy` needs neither data nor judge, to see that it runs.

    python experiments/rivals.py train --scale oracle --out OUT --minutes 4 --seeds 2
    python experiments/rivals.py table (the same)

is the same comparison on the oracle language, with the networks and batches of its recipes, on a
CPU (with OMP_NUM_THREADS=1; two processes may train `--roles` of their own beside each other). What
the language itself says of all samples, models without a path KL included, is in `truth.json`.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from didi_instruct.evaluation.quick import oracle_facts
from didi_instruct.evaluation.samples import read_samples
from didi_instruct.reproduce.grid import Grid, Standing
from didi_instruct.reproduce.items_baselines import BASELINE_ITEMS
from didi_instruct.reproduce.jobs import Job, in_order
from didi_instruct.reproduce.making import lasting, make
from didi_instruct.reproduce.measuring import EVALS
from didi_instruct.reproduce.paces import SHORT, expected, pace_jobs
from didi_instruct.reproduce.running import finished
from didi_instruct.reproduce.scale import FIRST, Given, Scale, Training, role_of
from didi_instruct.reproduce.scales import find_scale

JUDGED = {"temperature": 0.8, "collapse_spaces": True, "end": "<s>", "beyond": "uniform"}
"""How `stories15m` tells stories, and so how it judges them."""
PRETRAINED = ("ar", "duo-teacher")
LAST = "duo"
ORACLE = "oracle"
PRETRAINING = ("train.steps=2000", "train.batch_size=128", "train.ema=0.995")
STUDENT = ("train.batch_size=128", "train.eval_every=0", "watch.budgets=[]", "train.ema=0.98")
BANK = ("reference.rows=4096", "reference.steps=64")
LITERAL = (
    *STUDENT,
    *BANK,
    "train.log_every=10",
    "optim.lr=1e-4",
    "optim.beta2=0.98",
    "discriminator.lr=3e-4",
    "discriminator.warmup=50",
    "discriminator.trainable_blocks=1",
    "train.steps=1000",
    "watch.min_entropy=0",
)
"""DiDi-Instruct as the paper has it, with rates that were good in earlier runs (docs/log.md)."""


class Told:
    """A line for every job that begins or ends."""

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None

    def show(self, standings: Sequence[Standing], changed: Standing) -> None:
        """One of them has changed."""
        now = changed.job.name, changed.state
        if now != self._last:
            self._last = now
            why = changed.note if changed.state == "failed" else ""
            print(time.strftime("%H:%M:%S"), *now, f"{changed.seconds:.0f} s", why, flush=True)


def scale_of(asked: argparse.Namespace) -> Scale:
    """The scale, as the command line makes it."""
    if asked.scale == ORACLE:
        return oracle_scale(asked.seeds)
    given = Given(
        data=asked.data,
        judge=asked.judge,
        judge_options=JUDGED if asked.judge else {},
        seeds=asked.seeds,
        mauve=asked.mauve,
    )
    scale = find_scale(asked.scale, given)
    return scale.with_rivals(asked.rivals) if asked.rivals else scale


def oracle_scale(seeds: int) -> Scale:
    """The oracle language with models of its recipes' size, where `toy` has networks of seconds."""
    students = ("sdtt", "dimo", "duo", "token-matching")
    return replace(
        find_scale("toy", Given(seeds=seeds)),
        says="The oracle language with models of its recipes, judged by the language itself.",
        made_by=f"python experiments/rivals.py table --scale oracle --seeds {seeds} --minutes ...",
        teacher=Job(
            name="teacher", does="pretrain", recipe="oracle-teacher", overrides=PRETRAINING
        ),
        models={
            **{role: Training(f"oracle-{role}", PRETRAINING) for role in PRETRAINED},
            **{role: Training(f"oracle-{role}", STUDENT) for role in students},
            "jump": Training("oracle-didi", (*STUDENT, *BANK)),
        },
        ablation=LITERAL,
        few=(1, 2),
        most_steps=64,
        samples=1024,
        batch_size=256,
        temperatures=(0.9, 0.8, 0.7),
        top_ps=(0.95, 0.9),
        parts=1,
    )


def brief(scale: Scale) -> dict[str, Job]:
    """A short run of everything that is trained."""
    found = pace_jobs(scale)
    for role in (role for role in PRETRAINED if scale.has(role)):
        training = scale.models[role]
        shortened = Training(training.recipe, (*training.overrides, *SHORT))
        found[role] = replace(scale, models={**scale.models, role: shortened}).model(role)
    return found


def waited_for(asked: argparse.Namespace) -> list[str]:
    """Roles of the short runs whose models some result of the table still waits for."""
    jobs = table_jobs(foretold(asked), asked.out)
    jobs = [job for job in jobs if finished(job, asked.out) is None]
    roles = {role_of(job) for job in jobs if job.trains}
    roles |= {"path"} if FIRST in roles else set()
    return [role for role in brief(scale_of(asked)) if role in roles]


def compile_all(asked: argparse.Namespace) -> None:
    """All short runs at once, each in a process and a folder of its own."""
    scratch, started = asked.out / "compiling", time.monotonic()
    running = {}
    for role in asked.roles or waited_for(asked):
        words = [sys.executable, __file__, "one", *sys.argv[2:], "--role", role]
        running[role] = subprocess.Popen(words, start_new_session=True)
    while running and time.monotonic() < started + asked.limit:
        for role, process in list(running.items()):
            if process.poll() is not None:
                seconds = time.monotonic() - started
                print(f"{role}: {seconds:.0f} s, exit {running.pop(role).returncode}", flush=True)
        time.sleep(0.2)
    for role, process in running.items():
        print(f"{role}: stopped")
        os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


def compile_one(asked: argparse.Namespace) -> None:
    """One of them."""
    folder = asked.out / "compiling" / asked.role
    folder.mkdir(parents=True, exist_ok=True)
    Grid([brief(scale_of(asked))[asked.role]], folder).run()


def table_jobs(scale: Scale, out: Path) -> list[Job]:
    """Jobs of the table, what they still need included, and what is done beside them."""
    (item,) = BASELINE_ITEMS
    assert item.jobs is not None
    return in_order(item.jobs(scale), lambda job: finished(job, out) is not None)


def paced(asked: argparse.Namespace) -> Scale:
    """The scale by the paces of the folder, which are measured where they are not there."""
    scale = scale_of(asked)
    if asked.minutes is None:
        return scale
    return lasting(scale, asked.minutes, asked.out, board=Told())


def foretold(asked: argparse.Namespace) -> Scale:
    """The same with a guess in place of paces that are not there: nothing is run."""
    scale = scale_of(asked)
    return scale if asked.minutes is None else expected(scale, asked.minutes, asked.out)


def jobs_of(asked: argparse.Namespace) -> list[Job]:
    """Those of the table as it is asked for."""
    return table_jobs(scale_of(asked) if asked.untrained else paced(asked), asked.out)


def run(jobs: Sequence[Job], out: Path, gpus: Sequence[str] = ()) -> None:
    """Run jobs; say which failed, if any did, and end with that."""
    grid = Grid(jobs, out, board=Told())
    grid.run(gpus)
    if grid.failures:
        sys.exit("\n".join(f"{lost.job.name} failed: {lost.note}" for lost in grid.failures))


def train(asked: argparse.Namespace) -> None:
    """Everything that the table samples, one after the other."""
    trained = [job for job in jobs_of(asked) if job.trains]
    if asked.roles:
        trained = in_order([job for job in trained if role_of(job) in asked.roles])
    run(sorted(trained, key=lambda job: job.name.startswith(LAST)), asked.out)


def draw(asked: argparse.Namespace) -> None:
    """Samples of everything that was trained, and their numbers; or of what is there already."""
    gpus = ["0"] * asked.at_once if asked.scale != "toy" else ()
    jobs = [job for job in jobs_of(asked) if not job.timed]
    if asked.untrained:
        jobs = [job for job in jobs if not (job.trains or job.needs)]
    run(jobs, asked.out, gpus)


def table(asked: argparse.Namespace) -> None:
    """The table of what was trained, which `didi reproduce` makes of its own scales."""
    outcome = make(BASELINE_ITEMS, paced(asked), asked.out, board=Told())
    print(*(path for made in outcome.made for path in made.files), sep="\n")
    if asked.scale == ORACLE:
        (asked.out / "truth.json").write_text(json.dumps(truth(asked.out), indent=1))


def truth(out: Path) -> list[dict[str, Any]]:
    """Broken sentences and variety of all samples in a folder of the oracle language."""
    found = []
    for path in sorted((out / EVALS / "samples").glob("*.jsonl")):
        samples = read_samples(path)
        told = ("sampler", "nfe", "temperature", "top_p", "seed", "options")
        whose = {"model": Path(samples.origin.model).parent.name}
        settings = {name: getattr(samples.origin, name) for name in told}
        found.append(whose | settings | oracle_facts(samples.tokens))
    return found


def main() -> None:
    """Read what is asked for, and do it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=("compile", "train", "draw", "table", "one"))
    parser.add_argument("--scale", default="small")
    parser.add_argument("--data")
    parser.add_argument("--judge")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="of every student; else steps as recipes say")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150, help="seconds of compiling")
    parser.add_argument("--rivals", type=lambda words: words.split(","), help="of didi reproduce")
    parser.add_argument("--roles", type=lambda words: words.split(","), help="these of them alone")
    parser.add_argument("--no-mauve", action="store_false", dest="mauve")
    parser.add_argument("--at-once", type=int, default=6, help="processes that draw on one GPU")
    parser.add_argument("--untrained", action="store_true", help="draw of given models alone")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    stages = {"compile": compile_all, "train": train, "draw": draw, "table": table}
    (stages | {"one": compile_one})[asked.stage](asked)


if __name__ == "__main__":
    main()
