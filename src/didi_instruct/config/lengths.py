"""Lengths of texts as people write them: `100-500`, `100,200,300`."""

import re

from didi_instruct.config.model import NEVER
from didi_instruct.errors import UserError

DATA_LENGTHS = "data"
"""Stands for the lengths of the texts that a run reads."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_lengths(text: str) -> range | list[int]:
    """Lengths that a range or a list names, 1 or more each."""
    parts = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    found = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    several = len(parts) > 1 and any(part and part[2] for part in parts)
    if len(found) < len(parts) or several or not all(each and each[0] > 0 for each in found):
        raise UserError(
            f"lengths is {text!r}: give a range (100-500) or a list (100,200,300) of whole numbers "
            "from 1, the smaller end of a range first."
        )
    return found[0] if len(found) == 1 else [each[0] for each in found]


def law_of_lengths(text: str, longest: int) -> tuple[int, ...]:
    """`ModelConfig.lengths` of the even law on `read_lengths`, for a model of `longest` tokens."""
    lengths = read_lengths(text)
    # Not `max`, which goes through all of a range, however long.
    most = lengths[-1] if isinstance(lengths, range) else max(lengths)
    if most > longest:
        raise UserError(
            f"lengths is {text}, but the model reads at most {longest} tokens: use shorter ones."
        )
    wanted = set(lengths)
    return tuple(1 if length in wanted else NEVER for length in range(longest + 1))
