"""`didi data`: make training data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from didi_instruct.data.manifest import Long, Manifest, Rows, SplitInfo
    from didi_instruct.data.prepare import PrepareResult
    from didi_instruct.data.readers import Documents

app = typer.Typer(help="Make training data.", no_args_is_help=True)


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
            help="bytes, esm (proteins: ESM's 33 tokens), bpe:N (learn N ids from the corpus), a "
            "tokenizer.json, a folder with a tokenizer, a shipped model (stories/teacher), or a "
            "Hugging Face id."
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
    rows: Annotated[
        str,
        typer.Option(
            help="What a row holds: stream (all documents joined, cut anywhere) or document (one, "
            "its end-of-text, and more of that up to the length)."
        ),
    ] = "stream",
    long: Annotated[
        str,
        typer.Option(
            help="For --rows document: drop a document that does not fit a row, cut it, or split "
            "it into several rows."
        ),
    ] = "drop",
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
    from didi_instruct.cli.progress import PrepareBar
    from didi_instruct.data.prepare import PrepareSettings
    from didi_instruct.data.prepare import prepare as run
    from didi_instruct.hub.sources import find_shipped

    settings = PrepareSettings(
        src=src,
        tokenizer=str(find_shipped(tokenizer) or tokenizer),
        length=length,
        out=out,
        field=field,
        documents=cast("Documents", documents),
        rows=cast("Rows", rows),
        long=cast("Long", long),
        valid=valid,
        shard_rows=shard_rows,
        eot=eot,
        overwrite=overwrite,
    )
    with PrepareBar() as bar:
        result = run(settings, bar)
    typer.echo(_summary(result, tokenizer))


def _summary(result: "PrepareResult", asked: str) -> str:
    manifest = result.manifest
    state = "Already prepared" if result.already_prepared else "Wrote"
    size, (kind, _, wanted) = manifest.tokenizer.size, asked.partition(":")
    lines = [f"{state}: {result.folder}, vocabulary of {size:,} ids"]
    if kind == "bpe" and wanted.isdigit() and size < int(wanted):
        lines[0] += f" (of {int(wanted):,} asked for: this text has no more that repeat)"
    lines += [
        f"  {name}: {info.rows:,} rows of {manifest.length} tokens from "
        f"{_count(info.documents, 'document')}, {_count(len(info.shards), 'shard')}"
        f"{_exceptions(info, manifest)}"
        for name, info in manifest.splits.items()
        if info.rows
    ]
    return "\n".join(lines)


def _exceptions(info: "SplitInfo", manifest: "Manifest") -> str:
    """Tell which documents are not there whole, for rows of one document."""
    long = info.long_documents
    if long is None:
        return ""
    when_long = manifest.layout.long
    done = {"drop": "left out", "cut": "cut", "split": "split"}[when_long]
    said = f"; {long:,} too long for a row, {done}" if long else ""
    if when_long == "split":  # rows do not tell how many documents they are of
        return said
    empty = info.documents - info.rows - (long if when_long == "drop" else 0)
    return said + (f"; {empty:,} without any token, left out" if empty else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
