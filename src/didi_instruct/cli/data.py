"""`didi data`: make training data."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from didi_instruct.data.prepare import PrepareProgress, PrepareResult
    from didi_instruct.data.readers import Documents

app = typer.Typer(help="Make training data.", no_args_is_help=True)

_SECONDS_BETWEEN_LINES = 10.0
_STAGES = {
    "read": "Reading",
    "learn tokenizer": "Learning the tokenizer",
    "tokenise": "Tokenising",
}


@app.callback()
def data() -> None:
    """Make training data."""


@app.command()
def prepare(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A .txt, .jsonl, .csv, .parquet or .fasta file (also .gz, .xz, .zst), "
            "a folder of them, or hf:NAME[:split].",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes, bpe:N (learn N ids from the corpus), a tokenizer.json, a folder with a "
            "tokenizer, or a Hugging Face id."
        ),
    ],
    length: Annotated[int, typer.Option(help="Tokens in a row.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    field: Annotated[
        str, typer.Option(help="Field of a record, or column, that has the text.")
    ] = "text",
    documents: Annotated[
        str, typer.Option(help="What a document is in a .txt file: file, line or paragraph.")
    ] = "file",
    valid: Annotated[
        int | None,
        typer.Option(
            help="Documents to hold out, from the end of the corpus: 1% of them unless given, "
            "0 for none."
        ),
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(help="Rows in a shard file; about 64 MiB unless given.")
    ] = None,
    eot: Annotated[
        str | None,
        typer.Option(help="Token that ends a document; the tokenizer's own unless given."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other prepared data in the folder.")
    ] = False,
) -> None:
    """Tokenise and pack text into memory-mapped shards, split into train and valid.

    Stopped at any time, the same command goes on where it was.
    """
    from didi_instruct.data.prepare import PrepareSettings
    from didi_instruct.data.prepare import prepare as run

    settings = PrepareSettings(
        src=src,
        tokenizer=tokenizer,
        length=length,
        out=out,
        field=field,
        documents=cast("Documents", documents),
        valid=valid,
        shard_rows=shard_rows,
        eot=eot,
        overwrite=overwrite,
    )
    with ProgressBar() as bar:
        result = run(settings, bar.update)
    typer.echo(_summary(result))


def _summary(result: "PrepareResult") -> str:
    manifest = result.manifest
    state = "Already prepared" if result.already_prepared else "Wrote"
    lines = [f"{state}: {result.folder}, vocabulary of {manifest.tokenizer.size:,} ids"]
    lines += [
        f"  {name}: {info.rows:,} rows of {manifest.length} tokens from "
        f"{_count(info.documents, 'document')}, {_count(len(info.shards), 'shard')}"
        for name, info in manifest.splits.items()
        if info.rows
    ]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ProgressBar:
    """Shows how far a preparation is: a bar on a terminal, elsewhere a line now and then.

    Nothing appears before the first `update`. An open bar is itself a Report.
    """

    def __init__(self) -> None:
        self._display: _Bars | _Lines | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def update(self, progress: "PrepareProgress") -> None:
        """Show the progress."""
        if self._display is None:
            from rich.console import Console

            console = Console(stderr=True)
            self._display = _Bars(console) if console.is_terminal else _Lines()
        self._display.update(progress)

    __call__ = update


class _Rate:
    """Speed of the current stage. A resumed stage does not begin at 0, so the start is kept."""

    def __init__(self) -> None:
        self._stage: str | None = None

    def begins(self, progress: "PrepareProgress") -> bool:
        """Note the start of a new stage, and tell whether this is one."""
        if progress.stage == self._stage:
            return False
        self._stage, self._since, self._first = progress.stage, time.monotonic(), progress.done
        return True

    def per_second(self, progress: "PrepareProgress") -> float:
        """Return the average speed since the stage began."""
        elapsed = time.monotonic() - self._since
        return (progress.done - self._first) / elapsed if elapsed > 0 else 0.0

    def text(self, progress: "PrepareProgress") -> str:
        """Write the speed as people read it."""
        unit = "MB/s" if progress.unit == "bytes" else "M characters/s"
        return f"{self.per_second(progress) / 1e6:.1f} {unit}"


class _Bars:
    """Progress as a bar per stage."""

    def __init__(self, console: "Console") -> None:
        from rich import progress as rich

        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TextColumn("{task.fields[rate]}"),
            rich.TimeRemainingColumn(),
        )
        self._bars = rich.Progress(*columns, console=console)
        self._bars.start()
        self._rate = _Rate()

    def update(self, progress: "PrepareProgress") -> None:
        if self._rate.begins(progress):
            self._task = self._bars.add_task(_STAGES[progress.stage], rate="")
        self._bars.update(
            self._task,
            completed=progress.done,
            total=progress.total or None,
            rate=self._rate.text(progress),
        )

    def stop(self) -> None:
        self._bars.stop()


class _Lines:
    """Progress as plain lines: where each stage begins, then every few seconds."""

    def __init__(self) -> None:
        self._rate, self._next = _Rate(), 0.0

    def update(self, progress: "PrepareProgress") -> None:
        begins, now = self._rate.begins(progress), time.monotonic()
        if not begins and now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        line = _STAGES[progress.stage]
        if progress.total:
            line += f": {100 * progress.done / progress.total:.0f}%"
        speed = self._rate.per_second(progress)
        if not begins and speed > 0:
            line += f", {self._rate.text(progress)}"
            if progress.total:
                line += f", {_clock((progress.total - progress.done) / speed)} left"
        typer.echo(line, err=True)

    def stop(self) -> None:
        pass


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
