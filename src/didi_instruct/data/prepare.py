"""`didi data prepare`: a corpus in, memory-mapped rows of tokens out.

Two passes. The first reads and counts, so that bad input is refused before anything is written; the
second tokenises, packs and writes shards, and after each records where to go on. The result depends
on the input and the settings alone: not on cores, batches or interruptions.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from didi_instruct.data import readers
from didi_instruct.data.corpus import Corpus, Cursor, SplitPlan, plan_split, scan_sources
from didi_instruct.data.files import no_space_as_user_error, remove_temporaries, require_space
from didi_instruct.data.manifest import (
    Layout,
    Long,
    Manifest,
    Rows,
    Split,
    SplitInfo,
    TokenizerInfo,
)
from didi_instruct.data.packing import ShardWriter, SplitStream, TokenBatch, arrange, encode_pieces
from didi_instruct.data.readers import Documents, ReadOptions, check_documents
from didi_instruct.data.resume import (
    PROGRESS_FILE,
    PrepareState,
    check_settings,
    check_shards,
    check_sources,
    clear_folder,
    inspect_folder,
)
from didi_instruct.data.sources import Source, find_sources
from didi_instruct.data.tokenizer import END_OF_TEXT, Tokenizer, residues_of, train_tokenizer
from didi_instruct.errors import Argument, UserError

_SHARD_BYTES = 64 << 20
_TOKENIZER_CHARACTERS = 200_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSettings:
    """Settings of one preparation."""

    src: str
    """A file, a folder or `hf:NAME[:split]`."""
    tokenizer: str
    """`bytes`, `esm`, `bpe:N`, a tokenizer.json or its folder, or a Hugging Face id."""
    length: int
    """Tokens in a row."""
    out: Path
    """Folder to write."""
    field: str = "text"
    """Field of a record that has the text."""
    documents: Documents = "file"
    """What a document is in a .txt file."""
    rows: Rows = "stream"
    """What a row holds: a stretch of all documents joined, or one document and its end."""
    long: Long = "drop"
    """A document that does not fit a row of its own is left out, cut, or split into several."""
    valid: int | None = None
    """Documents to hold out, from the end; None for 1% of them, at least one."""
    shard_rows: int | None = None
    """Rows in a shard; None for about 64 MiB."""
    eot: str | None = None
    """Token that ends a document; None for the tokenizer's own."""
    overwrite: bool = False
    """Start over where the folder holds other data of this kind."""
    batch_characters: int = 1 << 20
    """Text tokenised at once: a matter of memory and speed, not of the result."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.length < 1:
            raise UserError("{} is {}: use 1 or more.", Argument("length"), self.length)
        if self.valid is not None and self.valid < 0:
            raise UserError("{} is {}: use 0 or more.", Argument("valid"), self.valid)
        if self.shard_rows is not None and self.shard_rows < 1:
            raise UserError("{} is {}: use 1 or more.", Argument("shard_rows"), self.shard_rows)
        check_documents(self.documents)
        Layout(self.rows, self.long)  # refuses by itself
        if self.bpe_size is not None and self.eot not in (None, END_OF_TEXT):
            raise UserError(
                "{} is `{}`, but a bpe:N tokenizer has {}.", Argument("eot"), self.eot, END_OF_TEXT
            )

    @property
    def layout(self) -> Layout:
        """How documents lie in rows."""
        return Layout(self.rows, self.long)

    def reading(self, tokenizer: Tokenizer | None) -> ReadOptions:
        """How documents are read: as chains of residues where a tokenizer knows nothing else."""
        residues = "" if tokenizer is None else residues_of(tokenizer.vocabulary)
        return ReadOptions(field=self.field, documents=self.documents, residues=residues)

    @property
    def bpe_size(self) -> int | None:
        """The N of `bpe:N`; None for a tokenizer that exists already."""
        if not self.tokenizer.startswith("bpe:"):
            return None
        size = self.tokenizer.removeprefix("bpe:")
        if not size.isascii() or not size.isdigit() or int(size) < 257:
            raise UserError(
                "{} is `{}`: use bpe:N with N of 257 or more, for 256 bytes and {}.",
                Argument("tokenizer"),
                self.tokenizer,
                END_OF_TEXT,
            )
        return int(size)


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far a stage has come."""

    stage: Literal["read", "learn tokenizer", "tokenise"]
    done: int
    total: int
    """0 where it is not known."""
    unit: Literal["bytes", "characters"]


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """What there is now."""

    folder: Path
    manifest: Manifest
    already_prepared: bool
    """Nothing was to be done."""


Report = Callable[[PrepareProgress], None]


def prepare(
    settings: PrepareSettings, progress: Report | None = None, tokenizer: Tokenizer | None = None
) -> PrepareResult:
    """Tokenise and pack a corpus into `settings.out`, or go on where an earlier run stopped.

    `tokenizer` is what `settings.tokenizer` names, where it is loaded already.
    """
    report = progress or (lambda _: None)
    sources = find_sources(settings.src)
    if tokenizer is None and settings.bpe_size is None:
        tokenizer = Tokenizer.load(settings.tokenizer, settings.eot)
    identity = _identity(settings, tokenizer)
    found = inspect_folder(settings.out, settings.overwrite)
    if isinstance(found, Manifest) and not settings.overwrite:
        check_settings(settings.out, found.settings, identity, "data prepared otherwise")
        check_sources(settings.out, found.sources, sources, "data prepared from other text")
        (settings.out / PROGRESS_FILE).unlink(missing_ok=True)  # killed just after the manifest
        return PrepareResult(settings.out, found, already_prepared=True)

    with _all_cores(), no_space_as_user_error(settings.out):
        if isinstance(found, PrepareState) and not settings.overwrite:
            state, corpus, tokenizer = _resume(settings, identity, found, sources)
        else:
            state, corpus, tokenizer = _begin(settings, identity, sources, tokenizer, report)
        plan = _plan(settings, corpus)
        _pack(settings, state, corpus, plan, tokenizer, report)
        manifest = _manifest(settings, state, plan)
        manifest.write(settings.out)
        (settings.out / PROGRESS_FILE).unlink()
    return PrepareResult(settings.out, manifest, already_prepared=False)


def _identity(settings: PrepareSettings, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Collect the settings that decide the result; two runs that agree here may be joined."""
    eot_id = None
    if tokenizer is not None:
        eot_id = TokenizerInfo.of(tokenizer, settings.tokenizer).eot_id
    return {
        "length": settings.length,
        "tokenizer": settings.tokenizer if tokenizer is None else f"sha256:{tokenizer.hash}",
        "eot_id": eot_id,
        "field": settings.field,
        "documents": settings.documents,
        "valid": settings.valid,
        "shard_rows": settings.shard_rows,
        "piece_characters": readers.PIECE_CHARACTERS,
        **settings.layout.settings,
    }


def _begin(
    settings: PrepareSettings,
    identity: dict[str, Any],
    sources: list[Source],
    tokenizer: Tokenizer | None,
    report: Report,
) -> tuple[PrepareState, Corpus, Tokenizer]:
    """Read the corpus, make sure that the run can succeed, and only then touch the folder."""
    options = settings.reading(tokenizer)
    modified = [_modified(source) for source in sources]
    size = sum(source.size for source in sources)
    scans = scan_sources(
        sources, options, lambda read: report(PrepareProgress("read", read, size, "bytes"))
    )
    corpus = Corpus(sources, options, scans)
    if corpus.documents == 0:
        raise UserError(f"{settings.src}: the corpus is empty, no document has any text.")
    plan = _plan(settings, corpus)
    if tokenizer is None:
        assert settings.bpe_size is not None
        text = _tokenizer_text(corpus, plan, report)
        tokenizer = train_tokenizer(text, settings.bpe_size)
    info = TokenizerInfo.of(tokenizer, settings.tokenizer)
    _check_rows_and_space(settings, corpus, plan, tokenizer, info)

    clear_folder(settings.out)
    tokenizer.save(settings.out)
    state = PrepareState(info, identity, scans, modified)
    state.write(settings.out)
    return state, corpus, tokenizer


def _plan(settings: PrepareSettings, corpus: Corpus) -> SplitPlan:
    """Decide what is held out; a document in a row of its own stays whole."""
    plan = plan_split(corpus, settings.valid)
    if plan.by == "piece" and settings.rows == "document":
        raise UserError(
            "{}: is a single document, which {} keeps whole, so no part can be held out: use {} or "
            "paragraph, add text, or use {}.",
            settings.src,
            Argument("rows", "document"),
            Argument("documents", "line"),
            Argument("valid", 0),
        )
    return plan


def _modified(source: Source) -> int | None:
    return None if source.path is None else source.path.stat().st_mtime_ns


def _resume(
    settings: PrepareSettings, identity: dict[str, Any], state: PrepareState, sources: list[Source]
) -> tuple[PrepareState, Corpus, Tokenizer]:
    """Go on with an unfinished run, if it is the same one."""
    folder = settings.out
    check_settings(folder, state.settings, identity, "an unfinished run with other settings")
    what = "an unfinished run over other text"
    check_sources(folder, state.sources, sources, what, state.modified)
    check_shards(folder, state, settings.length * np.dtype(state.tokenizer.dtype).itemsize)
    tokenizer = Tokenizer.load(folder, settings.eot)
    if tokenizer.hash != state.tokenizer.hash:
        raise UserError(
            "{}: changed since the unfinished run wrote it: start over ({}).",
            folder / "tokenizer.json",
            Argument("overwrite"),
        )
    remove_temporaries(folder)
    options = settings.reading(tokenizer)
    return state, Corpus(sources, options, state.sources), tokenizer


def _tokenizer_text(corpus: Corpus, plan: SplitPlan, report: Report) -> Iterator[str]:
    """Give training text for a tokenizer: every piece, or every so manieth of a large corpus."""
    total = corpus.characters
    stride = -(-total // _TOKENIZER_CHARACTERS)
    for piece in corpus.walk():
        if plan.split_of(piece) != "train":
            return
        if piece.number % stride == 0:
            report(PrepareProgress("learn tokenizer", piece.characters, total, "characters"))
            yield piece.text


def _check_rows_and_space(
    settings: PrepareSettings,
    corpus: Corpus,
    plan: SplitPlan,
    tokenizer: Tokenizer,
    info: TokenizerInfo,
) -> None:
    """Make sure, from the beginning of each split, that it fills a row; and that all will fit."""
    tokens_per_character = 0.0
    for split in plan.splits:
        start = Cursor(plan.first_file(split, corpus.scans), 0)
        pieces = (piece for piece in corpus.walk(start) if plan.split_of(piece) == split)
        tokens = 0
        rows = arrange(settings.layout, info.eot_id, settings.length)
        for batch in encode_pieces(pieces, tokenizer, rows, info.dtype, settings.batch_characters):
            tokens += len(batch.tokens)
            if split == "train":
                tokens_per_character = tokens / batch.characters
            if tokens >= settings.length:
                break
        if tokens < settings.length:
            raise _no_row(settings, plan, split, tokens, rows.long)
    # One part in ten more than the sample says, as the rest may be harder to compress.
    size = 1.1 * tokens_per_character * corpus.characters * np.dtype(info.dtype).itemsize
    require_space(settings.out, int(size))


def _no_row(
    settings: PrepareSettings, plan: SplitPlan, split: Split, tokens: int, long: int
) -> UserError:
    count = plan.documents(split)
    documents = "1 document" if count == 1 else f"{count} documents"
    length = Argument("length")
    if split == "train":
        part, remedy = f"training part ({documents})", UserError("add text or a shorter {}", length)
    elif plan.by == "piece":
        part = "held-out end of the document"
        remedy = UserError("use a shorter {}, or {}", length, Argument("valid", 0))
    else:
        part = f"held-out part ({documents})"
        remedy = UserError("hold out more ({}), or use a shorter {}", Argument("valid"), length)
    if long:
        return UserError(
            "{}: no document of the {} fits a row of {} with its end-of-text: use a larger {}, or "
            "cut documents with {} or split.",
            settings.src,
            part,
            settings.length,
            length,
            Argument("long", "cut"),
        )
    return UserError(
        "{}: the {} has {} tokens, fewer than one row of {}: {}.",
        settings.src,
        part,
        tokens,
        settings.length,
        remedy,
    )


def _pack(
    settings: PrepareSettings,
    state: PrepareState,
    corpus: Corpus,
    plan: SplitPlan,
    tokenizer: Tokenizer,
    report: Report,
) -> None:
    """Write the shards that are still to be written."""
    dtype = state.tokenizer.dtype
    row_bytes = settings.length * np.dtype(dtype).itemsize
    shard_rows = settings.shard_rows or max(1, _SHARD_BYTES // row_bytes)
    pieces = SplitStream(plan, corpus.walk(state.cursor))
    while state.split is not None:
        split = state.split
        writer = ShardWriter(settings.out, split, settings.length, shard_rows, state.shards[split])
        carried = np.array(state.leftover, dtype)
        long = state.long[split]
        rows = arrange(settings.layout, state.tokenizer.eot_id, settings.length, long)
        batch = TokenBatch(carried, np.array([len(carried)]), [state.cursor], [long], 0)
        try:
            _pack_batch(settings.out, state, writer, batch)
            for batch in encode_pieces(
                pieces.of(split), tokenizer, rows, dtype, settings.batch_characters
            ):
                _pack_batch(settings.out, state, writer, batch)
                done, total = batch.characters, corpus.characters
                report(PrepareProgress("tokenise", done, total, "characters"))
            state.dropped[split] = writer.finish()
        finally:
            writer.discard()
        state.cursor, state.leftover, state.long[split] = batch.cursors[-1], [], rows.long
        state.split = "valid" if split == "train" and "valid" in plan.splits else None
        state.write(settings.out)


def _pack_batch(folder: Path, state: PrepareState, writer: ShardWriter, batch: TokenBatch) -> None:
    """Pack a batch, and after each shard it completes record where to go on."""
    assert state.split is not None
    for used in writer.add(batch.tokens):
        state.cursor, leftover, state.long[state.split] = batch.split_at(used)
        state.leftover = leftover.tolist()
        state.write(folder)


def _manifest(settings: PrepareSettings, state: PrepareState, plan: SplitPlan) -> Manifest:
    splits: dict[str, SplitInfo] = {}
    for split, shards in state.shards.items():
        rows = sum(shard.rows for shard in shards)
        documents = plan.documents(split) if split in plan.splits else 0
        tokens = rows * settings.length
        long = state.long[split] if settings.rows == "document" else None
        splits[split] = SplitInfo(documents, tokens, rows, state.dropped[split], shards, long)
    return Manifest(state.tokenizer, settings.length, splits, state.sources, state.settings)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer use all cores, whatever the environment says; the result is the same."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
