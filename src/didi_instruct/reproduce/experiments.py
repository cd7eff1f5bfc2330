"""The registry of experiments, and how one becomes files: a grid of jobs, then a table each."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from didi_instruct.config.schema import nearest
from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce.ablations import ABLATION_ITEMS, REFERENCE_ITEMS
from didi_instruct.reproduce.add_tokenizer import given_source
from didi_instruct.reproduce.baselines import BASELINE_ITEMS
from didi_instruct.reproduce.downstream import DOWNSTREAM_ITEMS
from didi_instruct.reproduce.figures import can_draw
from didi_instruct.reproduce.generation import DIVERSITY_ITEMS, GENERATION_ITEMS
from didi_instruct.reproduce.grid import Board, Grid, NoBoard, Standing
from didi_instruct.reproduce.guidance import GUIDANCE_ITEMS
from didi_instruct.reproduce.jobs import Job, in_order
from didi_instruct.reproduce.latency import LATENCY_ITEMS
from didi_instruct.reproduce.lines import Answers, Experiment, Line, Results
from didi_instruct.reproduce.minutes import kept, measured, pace_jobs, with_minutes
from didi_instruct.reproduce.proteins import PROTEIN_ITEMS
from didi_instruct.reproduce.running import finished
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import Edition, Table, write_table
from didi_instruct.reproduce.zero_shot import ZERO_SHOT_ITEMS

ITEMS: Mapping[str, Experiment] = {
    item.name: item
    for item in (
        *GENERATION_ITEMS,
        *ABLATION_ITEMS,
        *REFERENCE_ITEMS,
        *DIVERSITY_ITEMS,
        *LATENCY_ITEMS,
        *ZERO_SHOT_ITEMS,
        *GUIDANCE_ITEMS,
        *BASELINE_ITEMS,
        *DOWNSTREAM_ITEMS,
        *PROTEIN_ITEMS,
    )
}


def find_item(name: str, items: Mapping[str, Experiment]) -> Experiment:
    """The item of that name."""
    if name not in items:
        raise UserError(f"`{name}` is not an item.{nearest(name, list(items))}")
    return items[name]


@dataclass(slots=True)
class Made:
    """An experiment with its table, or the reason why there is none."""

    item: Experiment
    table: Table | None
    files: list[Path] = field(default_factory=list)
    error: str = ""
    """Reason for the missing table."""


@dataclass(slots=True)
class Outcome:
    """Tables of all experiments, and the jobs that failed."""

    made: list[Made]
    failures: list[Standing]

    @property
    def whole(self) -> bool:
        """True if nothing failed."""
        return not self.failures and not any(one.error for one in self.made)


def jobs_of(items: Sequence[Experiment], scale: Scale, out: Path) -> list[Job]:
    """All jobs of some experiments, in order, each once."""
    jobs = [line.job for item in items for line in item.lines(scale)]
    return in_order(jobs, lambda job: finished(job, out) is not None)


def make(
    items: Sequence[Experiment],
    scale: Scale,
    out: Path,
    *,
    device: str | None = None,
    gpus: Sequence[str] = (),
    board: Board | None = None,
) -> Outcome:
    """Run what is missing and write every item's table into `out`."""
    graphs = [(item, list(item.lines(scale))) for item in items]
    grid = Grid(_measuring(graphs), out, device=device, board=board or NoBoard())
    grid.run(gpus)
    return _written(graphs, scale, grid, out)


def write_only(items: Sequence[Experiment], scale: Scale, out: Path) -> Outcome:
    """Every item's table of what has finished in `out`; nothing is run, what is missing is said."""
    graphs = [(item, list(item.lines(scale))) for item in items]
    grid = Grid(_measuring(graphs), out)
    grid.give_up("not run yet")
    return _written(graphs, scale, grid, out)


Graph = tuple[Experiment, Sequence[Line]]
"""An experiment with its lines, which are built once."""


def _measuring(graphs: Sequence[Graph]) -> list[Job]:
    return [line.job for _, lines in graphs for line in lines]


def _written(graphs: Sequence[Graph], scale: Scale, grid: Grid, out: Path) -> Outcome:
    made = [write(item, lines, scale, grid, out) for item, lines in graphs]
    return Outcome(made, grid.failures)


def lasting(
    scale: Scale, minutes: float, out: Path, *, device: str | None = None, board: Board
) -> Scale:
    """The scale with students that train so many minutes each, by their paces in `out`."""
    jobs = pace_jobs(scale)
    paces = kept(jobs, out)
    missing = {role: job for role, job in jobs.items() if role not in paces}
    if missing:
        grid = Grid(list(missing.values()), out, device=device, board=board)
        grid.run()
        if grid.failures:
            first = grid.failures[0]
            raise UserError(f"A pace could not be measured: {first.job.name}: {first.note}")
        paces |= measured(missing, out)
    return with_minutes(scale, minutes, paces)


def write(item: Experiment, lines: Sequence[Line], scale: Scale, grid: Grid, out: Path) -> Made:
    """Write an experiment's table from the finished jobs; without any, an older one stays."""
    mine = {job.key: job for job in in_order([line.job for line in lines])}
    standings = [s for s in grid.standings if s.job.key in mine]
    failed = [f"{s.job.name}: {s.note}" for s in grid.failures if s.job.key in mine]
    results, note = judged_by_others(grid.results, [s.job for s in standings], scale)
    try:
        table = item.table(scale, Answers(lines, results))
    except (KeyError, ValueError) as error:
        if not failed:
            raise
        return _lost(item, f"{failed[0]} ({error})", out)
    if not table.rows:
        return _lost(item, failed[0] if failed else "its jobs found nothing", out)
    notes = [note] if note else []
    if item.name in scale.apart:
        notes.append(f"Not part of `all` at scale {scale.name}, for what it costs: made by name.")
    table = replace(table, title=table.title or item.title, notes=[*table.notes, *notes])
    picture = _draw(item, scale, table, out / "tables", failed)
    edition = Edition(
        item=item.name,
        where=item.where,
        scale=scale.name,
        says=scale.says,
        judge=scale.judge_name,
        provenance={
            **dict(origin(standings, provenance())),
            "seeds": scale.seed_list,
            "command": command(item, scale),
        },
        jobs=[*map(_job, standings), *_elsewhere(mine, standings)],
        failed=failed,
        figure=picture,
    )
    return Made(item, table, write_table(table, edition, out / "tables"))


def _lost(item: Experiment, why: str, out: Path) -> Made:
    """An experiment without results; a table of an earlier run is left in place."""
    older = (out / "tables" / f"{item.name}.md").exists()
    stays = "; the one of an earlier run stays as it is" if older else ""
    return Made(item, None, error=f"no table: {why}{stays}")


OWN = ("ppl", "path_kl", "vsf", "gap_closed")
"""Numbers that a judge gives, and what is made of them."""


def judged_by_others(
    results: Results, jobs: Sequence[Job], scale: Scale
) -> tuple[dict[str, Any], str]:
    """Results without what a model says of its own samples, and a note where one did.

    Where no judge is given the left-to-right rival is itself the judge: it would win by that alone.
    """
    found, hidden = dict(results), False
    judge = scale.judge.key if isinstance(scale.judge, Job) else None
    for job in (job for job in jobs if job.key in found):
        own = {r for r, g in job.inputs.items() if isinstance(g, Job) and g.key == judge} - {
            "judge"
        }
        if not own or "judge" not in job.inputs or not isinstance(found[job.key], list):
            continue
        hidden = True
        found[job.key] = [
            _unjudged(row) if row.get("role", "model") in own else row for row in found[job.key]
        ]
    note = (
        "AR is itself the judge of this table, so its perplexity, path KL and vsF are left out: "
        "with --judge it has them."
    )
    return found, note if hidden else ""


def _unjudged(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if any(one in k for one in OWN) else v for k, v in row.items()}


def origin(standings: Sequence[Standing], here: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Provenance of a table: that of its jobs, and `here`, that of the process that writes it."""
    made = [s.provenance for s in standings if s.provenance]
    days = sorted(one["date"] for one in made if "date" in one)
    if days:
        yield "jobs finished", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    names = dict.fromkeys(name for one in made for name in one if name != "date")
    for name in names:
        yield name, "; ".join(dict.fromkeys(one[name] for one in made if name in one))
    yield "written", f"{here['date']}, commit {here.get('commit', 'unknown')}"
    others = sum(one.get("commit") != here.get("commit") for one in made)
    if others:
        yield (
            "note",
            f"{others} of {len(made)} jobs are of another commit than the code that writes",
        )


def _draw(
    item: Experiment, scale: Scale, table: Table, folder: Path, failed: list[str]
) -> str | None:
    """Name of the figure's file; where it cannot be drawn, `failed` says why."""
    path = folder / f"{item.name}.png"
    path.unlink(missing_ok=True)
    if item.draw is None or not table.rows:
        return None
    if not can_draw():
        failed.append('the figure: matplotlib is missing (pip install "didi-instruct[reproduce]")')
        return None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        item.draw(scale, table, path)
    except UserError as error:
        failed.append(f"the figure: {error}")
        return None
    return path.name


def command(item: Experiment, scale: Scale) -> str:
    """Command that makes this table again, with files by name alone."""
    if scale.made_by:
        return scale.made_by
    words = f"didi reproduce {item.name} --scale {scale.name} --seeds {len(scale.seeds)}"
    given = {"data": scale.data, "teacher": given_source(scale.teacher), "judge": scale.judge}
    usual = {"oracle", "openai-community/gpt2-large"}
    for flag, value in given.items():
        if isinstance(value, str) and value not in usual and not value.startswith("hf:"):
            words += f" --{flag} {_name(value)}"
    if isinstance(files := scale.tasks.get(item.name), str):
        words += f" --tasks {Path(files).parent.name}"
    for name, option in scale.judge_options.items():
        flag = f" --judge-{name.replace('_', '-')}"
        words += flag if option is True else f"{flag} {shlex.quote(str(option))}"
    if scale.minutes is not None and item.equal_minutes:
        words += f" --minutes {scale.minutes:g}"
    if scale.left_out:
        words += f" --rivals {','.join(scale.rivals)}"
    return words if scale.mauve else f"{words} --no-mauve"


def _name(source: str) -> str:
    """Name of a local file without its folder; other sources as they are."""
    return Path(source).name if Path(source).exists() else source


def _elsewhere(jobs: Mapping[str, Job], standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """Trainings behind results that came without their models."""
    here = {standing.job.key for standing in standings}
    missing = [job for key, job in jobs.items() if job.trains and key not in here]
    return [_job(Standing(job)) | {"state": "elsewhere", "seconds": None} for job in missing]


def _job(standing: Standing) -> dict[str, Any]:
    job = standing.job
    return {
        "name": job.name,
        "key": job.key,
        "does": job.does,
        "recipe": job.recipe,
        "overrides": [f"{k}={_name(v)}" for k, _, v in (o.partition("=") for o in job.overrides)],
        "state": standing.state,
        "seconds": round(standing.seconds, 1),
    }
