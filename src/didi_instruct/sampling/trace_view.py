"""A traced sample as its pictures show it: pieces of text, and what each step changes in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from didi_instruct.sampling.trace_text import visible


class State(IntEnum):
    """How a unit looks after a step."""

    MASKED = 0
    PARTIAL = 1
    """Some of its tokens are known, but no character is."""
    SHOWN = 2
    """The text is there to stay, unless a sampler masks it again."""
    DRAFT = 3
    """Another text than the final one."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of the final text, and the positions whose tokens it takes."""

    first: int
    last: int
    """Included."""
    text: str
    given: bool
    """Known before the first step."""
    eot: bool


@dataclass(frozen=True, slots=True)
class Change:
    """What a step made of a unit."""

    unit: int
    state: State
    confidence: float
    """Of the least certain token."""
    text: str
    """Of a draft."""


@dataclass(frozen=True, slots=True)
class View:
    """Units in order, what is not masked at the start, and the changes of each step."""

    units: list[Unit]
    start: list[Change]
    steps: list[list[Change]]
    times: list[float]
    """Where the steps started, then 0: the times of all frames."""

    def frames(self) -> Iterator[tuple[list[State], list[str], set[int]]]:
        """State and text of all units before the first step and after each, and which are new."""
        states = [State.MASKED] * len(self.units)
        texts = [unit.text for unit in self.units]
        for n, step in enumerate([self.start, *self.steps]):
            for change in step:
                states[change.unit] = change.state
                texts[change.unit] = change.text
            yield states, texts, {c.unit for c in step if c.state >= State.SHOWN and n > 0}

    def past_end(self, states: list[State], end: int | None) -> int:
        """Index of the first unit that the output leaves out, given the position of its end."""
        for i, unit in enumerate(self.units):
            if end is not None and unit.eot and unit.last >= end and states[i] == State.SHOWN:
                return i + 1
        return len(self.units)


def view(trace: dict[str, Any], sample: dict[str, Any]) -> View:
    """Find the units of a sample of `Trace.as_dict`, and follow them through the steps."""
    mask_id, units = trace["mask_id"], _units(trace, sample)
    unit_at = {p: i for i, unit in enumerate(units) for p in range(unit.first, unit.last + 1)}
    final, row, pieces = sample["tokens"], list(sample["start"]), list(sample["start_pieces"])
    confidence = [1.0] * len(row)

    def look(i: int) -> Change:
        part = slice(units[i].first, units[i].last + 1)
        state = _state(row[part], final[part], mask_id, trace["pad_id"])
        text = visible("".join(pieces[part])) if state == State.DRAFT else units[i].text
        return Change(i, state, min(confidence[part]), text)

    start = [change for i in range(len(units)) if (change := look(i)).state != State.MASKED]
    steps = []
    for step in sample["steps"]:
        news = zip(
            step["revealed"], step["tokens"], step["pieces"], step["confidence"], strict=True
        )
        for position, token, piece, certainty in news:
            row[position], pieces[position], confidence[position] = token, piece, certainty
        for position in step["masked"]:
            row[position], confidence[position] = mask_id, 1.0
        touched = {unit_at[p] for p in (*step["revealed"], *step["masked"])}
        steps.append([look(i) for i in sorted(touched)])
    return View(units, start, steps, [*(step["time"] for step in sample["steps"]), 0.0])


def _units(trace: dict[str, Any], sample: dict[str, Any]) -> list[Unit]:
    """Join the tokens without text of their own to the one that completes their character."""
    final, start, pieces = sample["tokens"], sample["start"], sample["pieces"]
    written = {position for step in sample["steps"] for position in step["revealed"]}
    found, first = [], 0
    for i, piece in enumerate(pieces):
        part = slice(first, i + 1)
        if not piece and i < len(pieces) - 1:
            continue
        if any(token != trace["pad_id"] for token in final[part]):
            given = start[part] == final[part] and written.isdisjoint(range(first, i + 1))
            found.append(Unit(first, i, visible(piece), given, final[i] == trace["eot_id"]))
        first = i + 1
    while found and found[-1].eot and found[-1].given:
        found.pop()  # what fills a window after a text whose length was given
    return found


def _state(row: list[int], final: list[int], mask_id: int, pad_id: int) -> State:
    masks = row.count(mask_id)
    if masks:
        return State.MASKED if masks + row.count(pad_id) == len(row) else State.PARTIAL
    return State.SHOWN if row == final else State.DRAFT
