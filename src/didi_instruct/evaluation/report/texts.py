"""Sample texts side by side: the same seed and the same number, one column per model and budget."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from didi_instruct.evaluation.report.content import Content
from didi_instruct.evaluation.report.lines import short_names
from didi_instruct.evaluation.samples import SampleSet

COLUMNS, TEXTS = 4, 3
HEAD = 600
"""Characters of a text that are shown at once; what is only a little longer is shown whole."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Side:
    """A column: who wrote it and how, and its texts."""

    label: str
    steps: str
    texts: tuple[tuple[str, str], ...]
    """Beginning and rest of each."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Columns of texts, and what to say of them."""

    sides: tuple[Side, ...]
    note: str

    @property
    def count(self) -> int:
        """Texts that every column has."""
        return min((len(side.texts) for side in self.sides), default=0)


def side_by_side(content: Content) -> SideBySide:
    """Few steps of each model between the baseline's few and most; see `COLUMNS`."""
    usable = [s for s in content.samples if any(text.strip() for text in s.texts)]
    if not usable:
        why = "the model has no tokenizer" if content.samples else "none were kept"
        return SideBySide((), f"There are no texts to show: {why}.")
    chosen, left_out = _choose(usable, {row["model"] for row in content.baseline})
    names = short_names([s.origin.model for s in usable])
    sides = []
    for samples in chosen:
        origin = samples.origin
        steps = f"{origin.nfe} step{'' if origin.nfe == 1 else 's'}"
        if (origin.temperature, origin.top_p) != (1, 1):
            steps += f", T {origin.temperature:g}, top-p {origin.top_p:g}"
        sides.append(Side(names[origin.model], steps, tuple(map(cut, samples.texts[:TEXTS]))))
    seeds = sorted({s.origin.seed for s in chosen})
    note = (
        f"The first texts of seed {seeds[0]}, not chosen; those with one number share their noise."
    )
    if len(seeds) > 1:
        note = f"The first texts of each, not chosen; their seeds differ ({seeds})."
    if left_out:
        note += f" Not shown: {', '.join(names[model] for model in left_out)}."
    return SideBySide(tuple(sides), note)


def _choose(usable: Sequence[SampleSet], baseline: set[str]) -> tuple[list[SampleSet], list[str]]:
    """Choose at most `COLUMNS` sets, and name the models that have none."""
    models = list(dict.fromkeys(s.origin.model for s in usable))
    by_model = {
        model: _by_budget([s for s in usable if s.origin.model == model]) for model in models
    }
    rivals = [model for model in models if model in baseline]
    others = [model for model in models if model not in baseline]
    first = [by_model[model][0] for model in rivals]
    last = [by_model[model][-1] for model in rivals if len(by_model[model]) > 1]
    room = max(0, COLUMNS - len(first) - len(last))
    middle = [by_model[model][0] for model in others[:room]]
    if not rivals:  # more steps of the same models, where there is room
        more = [by_model[m][-1] for m in others[:room] if len(by_model[m]) > 1]
        last = more[: max(0, COLUMNS - len(middle))]
    return [*first, *middle, *last][:COLUMNS], others[room:]


def _by_budget(sets: Sequence[SampleSet]) -> list[SampleSet]:
    """One set per budget, ascending: the plain setting, or else the first."""
    found: dict[int, SampleSet] = {}
    for samples in sorted(sets, key=lambda s: (s.origin.temperature, s.origin.top_p) != (1, 1)):
        found.setdefault(samples.origin.nfe, samples)
    return [found[nfe] for nfe in sorted(found)]


def cut(text: str) -> tuple[str, str]:
    """Beginning and rest of a text, parted between words; the rest of a short text is empty."""
    text = CONTROL.sub("\ufffd", text).strip()
    if len(text) <= 1.2 * HEAD:
        return text, ""
    space = max(text.rfind(" ", 0, HEAD), text.rfind("\n", 0, HEAD))
    # Writing without spaces, or one endless word, is parted anywhere.
    place = space if space > HEAD // 2 else HEAD
    return text[:place].rstrip(), text[place:].lstrip()
