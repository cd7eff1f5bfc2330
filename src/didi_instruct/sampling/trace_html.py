"""A trace as one HTML page that plays it, without network or other files."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from didi_instruct.sampling.trace import Change, Replay, State, replay

TEMPLATE = Path(__file__).with_name("trace.html.j2")


def render(trace: dict[str, Any]) -> bytes:
    """Render what `Trace.as_dict` returns.

    The final texts are in the page itself, to be read, printed and searched without its script,
    which only hides what is not yet written.
    """
    replays = [replay(trace, sample) for sample in trace["samples"]]
    about = dict(trace["about"])
    num_steps = [len(r.changes) - 1 for r in replays]
    num_tokens = [r.spans[-1].last + 1 for r in replays if r.spans]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=about.pop("title", "Denoising, step by step"),
        facts=[f"{_range(num_steps)} steps", f"{_range(num_tokens)} tokens"]
        + [f"{name} {value}" for name, value in about.items()],
        samples=[r.spans for r in replays],
        data=[_data(r) for r in replays],
    )
    return page.encode("utf-8", "replace")


def _range(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low}–{high}"


def _data(played: Replay) -> dict[str, Any]:
    """Input of the page's script; a change is [span, state, confidence, text of a draft]."""

    def pack(change: Change) -> list[Any]:
        draft = [change.text.strip()] if change.text != played.spans[change.span].text else []
        return [change.span, int(change.state), float(f"{change.confidence:.2g}"), *draft]

    start, *steps = played.changes
    return {
        "time": round(played.times[0], 4),
        "start": [pack(change) for change in start if change.state != State.MASKED],
        "steps": [
            {"time": round(time, 4), "changes": [pack(change) for change in changes]}
            for time, changes in zip(played.times[1:], steps, strict=True)
        ],
        "ends": played.ends,
        "tokens": [span.last - span.first + 1 for span in played.spans],
    }
