"""Zero-shot likelihood on the seven corpora of the paper (its table of zero-shot perplexities).

How text becomes rows, as in SEDD, MDLM and DUO: the corpus is detokenised, each document is
tokenised with the model's tokenizer and followed by end-of-text, all are joined in their order and
cut into rows of the model's length. A tail shorter than a row is dropped, so `tokens` says what was
measured. A perplexity is per token of that tokenizer, end-of-text included: it compares models only
where the tokenizer is the same.

Where this differs from the field: blank documents are left out (a third of WikiText's lines: to
the field each is one more end-of-text, which a model soon expects), and rows are cut as `didi data
prepare` cuts them (MDLM and DUO begin and end each row with an extra end-of-text, SEDD does not).
Of `scientific_papers` the field takes whole articles, so abstracts of PubMed and arXiv cannot be
compared with its numbers.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice

import numpy as np

from didi_instruct.data.dataset import TokenDataset
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError

DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one corpus in a model's tokens."""

    data: TokenDataset
    """Its fingerprint is that of the rows."""
    documents: int
    """Documents that begin in these rows."""


def pack(
    name: str, texts: Iterable[str], tokenizer: Tokenizer, length: int, rows: int | None = None
) -> Packed:
    """Join documents into rows of `length`, at most `rows`.

    No more documents are read than needed; the tail that fills no row is dropped.
    """
    if tokenizer.eot_id is None:
        raise UserError(
            "The model's tokenizer has no end-of-text token, so documents cannot be joined into "
            "rows: use a model whose tokenizer has one."
        )
    tokens: list[int] = []
    starts: list[int] = []
    remaining = iter(texts)
    while rows is None or len(tokens) < rows * length:
        batch = list(islice(remaining, DOCUMENTS_AT_ONCE))
        if not batch:
            break
        for ids in tokenizer.encode(batch):
            starts.append(len(tokens))
            tokens += [*ids, tokenizer.eot_id]
    full = len(tokens) // length if rows is None else min(rows, len(tokens) // length)
    if full == 0:
        raise UserError(
            f"{name}: its {len(starts)} documents have {len(tokens)} tokens, which do not fill "
            f"one row of {length}: use more text."
        )
    table = np.array(tokens[: full * length]).reshape(full, length)
    parts = (tokenizer.hash, str(length), sha256(table.tobytes()).hexdigest())
    fingerprint = sha256("/".join(parts).encode()).hexdigest()[:16]
    data = TokenDataset([table], tokenizer, name=name, fingerprint=fingerprint)
    return Packed(data, bisect_left(starts, full * length))
