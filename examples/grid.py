"""A grid of your own: four students of one recipe, two learning rates by two lengths of rollouts.

    python examples/grid.py --out out/grid        # a few minutes on two cores

What is done is kept: the same command goes on after Ctrl-C, and with more values in CHOICES it
trains what is new. The language is the built-in one, whose likelihood is known.
"""

import argparse
from pathlib import Path

from rich.console import Console

from didi_instruct.cli.board import ProgressBoard
from didi_instruct.cli.tables import render
from didi_instruct.reproduce.grid import Grid
from didi_instruct.reproduce.jobs import Job, sweep
from didi_instruct.reproduce.lines import learnt
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.scale import Given, Scale
from didi_instruct.reproduce.scales import find_scale
from didi_instruct.reproduce.scales_oracle import TOY_BANK, TOY_NETWORK, TOY_STUDENT
from didi_instruct.reproduce.tables import ENTROPY, PATH_KL, PPL, Table

RECIPE = "oracle-didi"
CHOICES = {"optim.lr": [1e-4, 3e-4], "didi.rollout_steps": [1, 4]}


def students(steps: int, teacher_steps: int) -> list[Job]:
    """A tiny student for each combination, all of one tiny teacher."""
    teacher = Job(
        name="teacher",
        does="pretrain",
        recipe="oracle-teacher",
        overrides=(*TOY_NETWORK, f"train.steps={teacher_steps}"),
    )
    short = ("discriminator.warmup=10", "train.ema=0.9", f"train.steps={steps}")
    return sweep(RECIPE, CHOICES, teacher=teacher, overrides=(*TOY_STUDENT, *TOY_BANK, *short))


def measured(grid: Grid, asked: dict[str, Job]) -> Table:
    """A line for each student, named by what was chosen."""
    rows = [
        {"method": name, **row}
        for name, job in asked.items()
        for row in grid.results.get(job.key, ())
    ]
    return Table(title=RECIPE, rows=rows, shown=(PPL, ENTROPY, PATH_KL), notes=learnt(rows))


def run(out: Path, scale: Scale, steps: int, teacher_steps: int) -> Table:
    """Train and measure what is missing in `out`, with a table of how far all are."""
    asked = {
        ", ".join(job.overrides[-len(CHOICES) :]): quality_job(
            scale, f"measure-{job.name}", job, steps=scale.budgets
        )
        for job in students(steps, teacher_steps)
    }
    with ProgressBoard() as board:
        grid = Grid(list(asked.values()), out, board=board)
        grid.run()
    return measured(grid, asked)


def main() -> None:
    """Run the grid and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/grid"))
    parser.add_argument("--steps", type=int, default=60, help="of each student")
    parser.add_argument("--teacher-steps", type=int, default=600)
    options = parser.parse_args()
    scale = find_scale("toy", Given())
    Console(highlight=False).print(
        render(run(options.out, scale, options.steps, options.teacher_steps))
    )


if __name__ == "__main__":
    main()
