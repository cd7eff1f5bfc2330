"""Why a row may look better than it is: its texts vary too little, or its sweep ended too soon.

Perplexity falls with variety, and so does, within limits, path KL: neither can be read alone. And
a setting is the best only of those that were tried.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.lines import Line, is_plain, tempered

LOW_ENTROPY = 0.02
"""Share of entropy whose loss is no longer noise: it can halve a perplexity by itself."""
LOW_VARIETY = 0.05
"""Share of distinct 4-grams lost, or of Self-BLEU won, that is no longer noise."""


class Sign(NamedTuple):
    """A measure of variety, and which way it goes where texts are too much alike."""

    field: str
    name: str
    worse: Literal["below", "above"]
    tolerance: float
    grows: bool
    """Whether it depends on how many texts there are."""


SIGNS = (
    Sign("entropy", "entropy", "below", LOW_ENTROPY, grows=False),
    Sign("unique_4gram", "4-grams", "below", LOW_VARIETY, grows=True),
    Sign("self_bleu", "Self-BLEU", "above", LOW_VARIETY, grows=True),
)


def doubt(content: Content, lines: Sequence[Line], row: Row) -> str | None:
    """Why a row's perplexity and path KL should not be compared: low variety, in words."""
    return "; ".join(_reasons(content, lines, row)) or None


def _reasons(content: Content, lines: Sequence[Line], row: Row) -> Iterator[str]:
    for sign in SIGNS:
        value = row.get(sign.field)
        level, whose = _level(content, lines, row, sign)
        if value is None or not level:
            continue
        lack = (1 if sign.worse == "above" else -1) * (value / level - 1)
        if lack > sign.tolerance:
            yield f"{sign.name} {value:.3f} is {lack:.1%} {sign.worse} {whose} {level:.3f}"


def _level(
    content: Content, lines: Sequence[Line], row: Row, sign: Sign
) -> tuple[float | None, str]:
    """What a measure should be: that of the reference text, or else of the plain baseline.

    Entropy is compared at equal steps; what grows with the number of texts, at an equal number of
    them, with the baseline's most steps, its nearest to real text.
    """
    rivals: list[tuple[Row, str]] = []
    real = content.real_like(row)
    if real.get(sign.field) is not None:
        rivals = [(real, "the reference text's")]
    else:
        for line in (line for line in lines if line.is_baseline):
            nfe = line.budgets[-1] if sign.grows else row["nfe"]
            plain = line.plain(nfe)
            if plain is not None and is_plain(plain):
                other = f" at {nfe} NFE" if nfe != row["nfe"] else ""
                rivals.append((plain, f"the plain baseline's{other}"))
    for rival, whose in rivals:
        same = rival.get("num_samples") == row.get("num_samples")
        if rival.get(sign.field) is not None and (same or not sign.grows):
            return rival[sign.field], whose
    return None, ""


def edge(line: Line, nfe: int) -> str | None:
    """The setting, where the best of a sweep is the lowest temperature or top-p that was tried."""
    best = line.best(nfe)
    tried = [tempered(row) for row in line.at(nfe) if row.get("path_kl") is not None]
    if best is None or best.get("path_kl") is None:
        return None
    for place, name in enumerate(("T", "top-p")):
        values = {settings[place] for settings in tried}
        if tempered(best)[place] == min(values) < max(values):
            return f"{name} {min(values):g}"
    return None
