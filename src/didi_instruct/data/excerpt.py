"""The first rows of a corpus, in memory: for evaluation, which needs a few and writes none."""

from collections.abc import Iterator

import numpy as np

from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.manifest import Layout
from didi_instruct.data.packing import arrange
from didi_instruct.data.readers import Piece, ReadOptions, read_pieces
from didi_instruct.data.sources import Meter, find_sources
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

PIECES_AT_ONCE = 64


def excerpt(
    src: str,
    tokenizer: Tokenizer,
    length: int,
    rows: int,
    options: ReadOptions | None = None,
    layout: Layout | None = None,
) -> TokenDataset:
    """Tokenise and pack as `didi data prepare` does, but only until `rows` rows are full.

    `layout` is that of the data a model learned from (`Manifest.layout`), a stream by default.
    """
    if tokenizer.eot_id is None:
        raise UserError(
            "The tokenizer has no end-of-text token, so documents cannot be joined into rows: "
            "give data prepared with a tokenizer that has one."
        )
    tokens: list[int] = []
    placing = arrange(layout or Layout(), tokenizer.eot_id, length)
    options = options or ReadOptions()
    pieces = (p for source in find_sources(src) for p in read_pieces(source, options, Meter()))
    for batch in _batches(pieces):
        for piece, ids in zip(batch, tokenizer.encode([p.text for p in batch]), strict=True):
            tokens += placing.place(ids, piece.last)
        if len(tokens) >= rows * length:
            break
    full = min(rows, len(tokens) // length)
    if full == 0 and placing.long:
        raise UserError(
            f"{src}: no document fits a row of {length} with its end-of-text: use shorter "
            "documents, or rows that cut them."
        )
    if full == 0:
        raise UserError(
            f"{src}: {len(tokens)} tokens do not fill one row of {length}: use a shorter length "
            "or more text."
        )
    table = np.array(tokens[: full * length]).reshape(full, length)
    return TokenDataset([table], tokenizer, name=src)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == PIECES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
