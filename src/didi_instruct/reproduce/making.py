"""From items to files: one grid for all of them, then a table for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce.figures import can_draw
from didi_instruct.reproduce.grid import Board, Grid, NoBoard, Standing
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.jobs import Job, in_order
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import Edition, Table, write_table


@dataclass(slots=True)
class Made:
    """An item as it came out."""

    item: Item
    table: Table | None
    files: list[Path] = field(default_factory=list)
    error: str = ""
    """Why there is no table."""


@dataclass(slots=True)
class Outcome:
    """All items, and the jobs that failed."""

    made: list[Made]
    failures: list[Standing]

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.failures and not any(one.error for one in self.made)


def jobs_of(items: Sequence[Item], scale: Scale) -> list[Job]:
    """All jobs of some items, in order, each once."""
    return in_order([job for item in items if item.jobs for job in item.jobs(scale)])


def make(
    items: Sequence[Item],
    scale: Scale,
    out: Path,
    *,
    device: str | None = None,
    gpus: Sequence[str] = (),
    board: Board | None = None,
) -> Outcome:
    """Run what is missing and write every item's table into `out`."""
    grid = Grid(jobs_of(items, scale), out, device=device, board=board or NoBoard())
    grid.run(gpus)
    return Outcome([write(item, scale, grid, out) for item in items], grid.failures)


def write(item: Item, scale: Scale, grid: Grid, out: Path) -> Made:
    """One item's table, of the jobs that have finished."""
    assert item.table is not None
    assert item.jobs is not None
    mine = {job.key for job in in_order(item.jobs(scale))}
    standings = [s for s in grid.standings if s.job.key in mine]
    failed = [f"{s.job.name}: {s.note}" for s in standings if s.state in ("failed", "blocked")]
    results = grid.results
    try:
        table = item.table(scale, results)
    except (KeyError, ValueError) as error:
        if not failed:
            raise
        return Made(item, None, error=f"no table: {failed[0]} ({error})")
    picture = _draw(item, scale, table, results, out / "tables", failed)
    edition = Edition(
        item=item.name,
        where=item.where,
        scale=scale.name,
        says=scale.says,
        judge=scale.judge_name,
        provenance={**provenance(), "seeds": scale.seed_list, "command": command(item, scale)},
        jobs=[_job(s) for s in standings],
        failed=failed,
        figure=picture,
    )
    return Made(item, table, write_table(table, edition, out / "tables"))


def _draw(
    item: Item, scale: Scale, table: Table, results: Results, folder: Path, failed: list[str]
) -> str | None:
    """Name of the figure's file; where it cannot be drawn, `failed` says why."""
    path = folder / f"{item.name}.png"
    path.unlink(missing_ok=True)
    if item.figure is None or not table.rows:
        return None
    if not can_draw():
        failed.append('the figure: matplotlib is missing (pip install "didi-instruct[reproduce]")')
        return None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        item.figure(scale, table, results, path)
    except UserError as error:
        failed.append(f"the figure: {error}")
        return None
    return path.name


def command(item: Item, scale: Scale) -> str:
    """What makes this table again; files by their names alone."""
    words = f"didi reproduce {item.name} --scale {scale.name} --seeds {len(scale.seeds)}"
    given = {"data": scale.data, "teacher": scale.teacher, "judge": scale.judge}
    usual = {"oracle", "openai-community/gpt2-large"}
    for flag, value in given.items():
        if isinstance(value, str) and value not in usual and not value.startswith("hf:"):
            words += f" --{flag} {_name(value)}"
    return words


def _name(source: str) -> str:
    """Where a file lay on this machine says nothing to a reader."""
    return Path(source).name if Path(source).exists() else source


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
