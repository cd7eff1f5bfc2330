"""Which part of a text each token wrote.

A token on its own says little: a byte-level one may hold half of a character, others owe their
space to the neighbour. So texts are cut out of the decoded whole.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from didi_instruct.sampling.chain import PAD

Decode = Callable[[Sequence[int]], str]
"""Ids to text, such as `Tokenizer.decode`."""

_BROKEN = "\ufffd"
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures of themselves: a text must not steer what shows it."""
    return text.translate(_CONTROLS)


def token_texts(ids: Sequence[int], decode: Decode, mask_id: int | None = None) -> list[str]:
    """Text of each position; joined, they are the decoded text.

    A character that needs several tokens belongs to the last of them; the others have "". Masks
    and padding have "" too, and the rest is decoded as if they were not there.
    """
    shown = [i for i, token in enumerate(ids) if token not in (mask_id, PAD)]
    tokens = [ids[i] for i in shown]
    texts = [""] * len(ids)
    if not tokens:
        return texts
    # After a mask a word looks as it does inside a text, not as at its start.
    lead = tokens[:1] if mask_id in ids[: shown[0]] else []
    for i, text in zip(shown, _cut([*lead, *tokens], decode)[len(lead) :], strict=True):
        texts[i] = text
    return texts


def _cut(tokens: list[int], decode: Decode) -> list[str]:
    """Cut the decoded text at the ends of its tokens, looking at a few tokens at a time."""
    text = decode(tokens)
    pieces: list[str] = []
    done = 0  # characters given to tokens
    # Up to token `settled` the text is whole characters; `context` is such a place before it.
    context = settled = settled_at = 0
    before = ""
    for k in range(len(tokens)):
        longer = decode(tokens[context : k + 1])[len(before) :]
        common = _agreement(longer, text[settled_at:])
        end = max(done, settled_at + common) if k < len(tokens) - 1 else len(text)
        pieces.append(text[done:end])
        done = end
        if longer and common == len(longer) and not longer.endswith(_BROKEN):
            context, settled, settled_at = settled, k + 1, done
            before = decode(tokens[context:settled])
    return pieces


def _agreement(a: str, b: str) -> int:
    """Number of characters with which both begin."""
    if b.startswith(a):
        return len(a)
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(b))


def find_end(
    row: Sequence[int],
    eot_id: int | None,
    mask_id: int | None,
    written: Sequence[bool] | None = None,
) -> int | None:
    """Position of the end-of-text token at which the output is cut, or None.

    It is the first that was written (not given) and follows text. Where the last position was
    given, what is given ends the text: nothing is cut but the end-of-text tokens at the very end,
    with which a text of a given length fills its window. `written` is None where all was.
    """
    ids = [i for i, token in enumerate(row) if token != PAD]
    if written is not None and ids and not written[ids[-1]]:
        filling = takewhile(lambda i: row[i] == eot_id and not written[i], reversed(ids))
        return min(filling, default=None)
    begun = False
    for i in ids:
        if row[i] == eot_id and begun and (written is None or written[i]):
            return i
        begun = begun or row[i] not in (eot_id, mask_id)
    return None


def output_ids(
    row: Sequence[int], eot_id: int | None, written: Sequence[bool] | None = None
) -> list[int]:
    """The tokens of a finished row that make the text people get: no padding, no end-of-text."""
    end = find_end(row, eot_id, None, written)
    return [token for token in row[:end] if token not in (PAD, eot_id)]
