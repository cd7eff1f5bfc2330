"""The one sentence that a reader came for: which model is better than the baseline, and where.

It rests on the path KL at each one's best setting, and on nothing else: where that difference was
not measured, or has no interval, there is no verdict.
"""

from collections import defaultdict
from collections.abc import Sequence

from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.doubts import doubt
from didi_instruct.evaluation.report.lines import Line, lines_of, short_names
from didi_instruct.evaluation.table import interval

FIELD = "path_kl_vs_baseline"


def verdict(content: Content) -> list[str]:
    """What is compared, and a clause for each model; empty where nothing can be said."""
    lines = lines_of(content)
    found = [_found(content, lines, line) for line in lines if not line.is_baseline]
    if not any(found) or not content.baseline:
        return []
    rivals = short_names([row["model"] for row in content.baseline])
    return [
        f"Path KL against {_and(list(rivals.values()))} at equal steps, each at its best setting",
        *filter(None, found),
    ]


def _found(content: Content, lines: Sequence[Line], line: Line) -> str:
    """One model: where it is better, where worse, and where neither can be told."""
    places: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for nfe in line.budgets:
        row = line.best(nfe)
        ends = None if row is None else interval(row, FIELD)
        if row is None or ends is None:
            continue
        which = "better" if ends[1] < 0 else "worse" if ends[0] > 0 else "not told apart"
        mark = "⚠ " if doubt(content, lines, row) else ""
        words = "{:+.2f} [{:+.2f}, {:+.2f}]".format(row[FIELD], *ends)
        places[which].append((nfe, f"({mark}{words})"))
    parts = [
        f"{which} at {_places(places[which])}"
        for which in ("better", "not told apart", "worse")
        if places[which]
    ]
    return f"{line.label} is {', '.join(parts)}" if parts else ""


def _places(places: Sequence[tuple[int, str]]) -> str:
    *first, (nfe, words) = places
    last = f"{nfe} step{'' if nfe == 1 else 's'} {words}"
    return _and([*(f"{steps} {found}" for steps, found in first), last])


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
