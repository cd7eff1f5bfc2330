"""A trace as one HTML page that plays it: no network, no files beside it."""

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from didi_instruct.sampling.trace_view import Change, Unit, View, view

TEMPLATE = Path(__file__).with_name("trace_page.html")


def render(trace: dict[str, Any]) -> bytes:
    """Fill the page with what `Trace.as_dict` returns.

    The final texts are in the page itself, so they can be read, printed and searched without
    the script; the script only hides what is not yet written.
    """
    views = [view(trace, sample) for sample in trace["samples"]]
    ends = [sample["end"] for sample in trace["samples"]]
    data = [_data(*pair) for pair in zip(views, ends, strict=True)]
    about = dict(trace["about"])
    parts = {
        "title": html.escape(str(about.pop("title", "Denoising, step by step"))),
        "facts": _facts(views, about),
        "tabs": "".join(
            f'<button type="button" data-sample="{i}">{i + 1}</button>' for i in range(len(views))
        ),
        "samples": "\n".join(_article(i, v) for i, v in enumerate(views)),
        "data": _script_safe(json.dumps(data, ensure_ascii=False, separators=(",", ":"))),
    }
    # Cut at the marks of the template before filling, so that no text can pose as a mark.
    pieces = TEMPLATE.read_text(encoding="utf-8").split("%%")
    page = "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    return page.encode("utf-8", "replace")


def _facts(views: list[View], about: dict[str, Any]) -> str:
    steps, tokens = {len(v.steps) for v in views}, {v.units[-1].last + 1 for v in views if v.units}
    facts = [f"{_span(steps)} steps", f"{_span(tokens)} tokens"]
    facts += [f"{name} {value}" for name, value in about.items()]
    return "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)


def _span(numbers: Iterable[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low}–{high}"


def _article(index: int, shown: View) -> str:
    spans, previous = [], None
    for unit in shown.units:
        spans.append(_unit(unit, again=previous is not None and previous.eot))
        previous = unit
    return (
        f'<article id="sample-{index}" aria-label="Sample {index + 1}">'
        f'<h2>Sample {index + 1}</h2><p dir="auto">{"".join(spans)}</p></article>'
    )


def _unit(unit: Unit, *, again: bool) -> str:
    """Spaces around a word stay outside of its block; alone, they are the block."""
    kind = "t given" if unit.given else "t"
    if unit.eot:
        return f'<span class="{kind} eot">{"" if again else "end"}</span>'
    word = unit.text.strip()
    if not word:
        lines = "\n" in unit.text
        inside, outside = ("", unit.text) if lines else (unit.text, "")
        return f'<span class="{kind}{" line" if lines else ""}">{inside}</span>{outside}'
    before, _, after = unit.text.partition(word)
    return f'{before}<span class="{kind}">{html.escape(word)}</span>{after}'


def _data(shown: View, end: int | None) -> dict[str, Any]:
    """Per step: the time after it, and [unit, state, confidence, text of a draft] of changes."""

    def pack(change: Change) -> list[Any]:
        draft = [change.text.strip()] if change.text != shown.units[change.unit].text else []
        return [change.unit, int(change.state), float(f"{change.confidence:.2g}"), *draft]

    ends = [i for i, u in enumerate(shown.units) if end is not None and u.eot and u.last >= end]
    return {
        "time": round(shown.times[0], 4),
        "start": [pack(change) for change in shown.start],
        "steps": [
            {"time": round(time, 4), "changes": [pack(change) for change in step]}
            for time, step in zip(shown.times[1:], shown.steps, strict=True)
        ],
        "ends": ends,
        "tokens": [u.last - u.first + 1 for u in shown.units],
    }


def _script_safe(text: str) -> str:
    """JSON that cannot close the element it stands in, nor open a comment there."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
