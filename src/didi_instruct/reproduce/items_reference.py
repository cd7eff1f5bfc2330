"""Item on the reference x' of Algorithm 1: three readings of what the teacher's texts are."""

from collections.abc import Iterator
from dataclasses import replace

from didi_instruct.reproduce import paper
from didi_instruct.reproduce.asking import (
    ALL_TRICKS,
    METHODS,
    Ask,
    answers,
    ask_method,
    learnt,
    printed,
    quality,
)
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.measuring import quality_job
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import Table

MANY = 256
"""Steps of the teacher behind a clean sample, where a scale does not say."""
LITERAL = "one step of the teacher, each iteration (Algorithm 1)"
WITHOUT_GUIDANCE = "ablation-without-guidance"


def readings(scale: Scale) -> dict[str, tuple[str, ...]]:
    """Overrides of each reading, by its line."""
    own = scale.ablated(ALL_TRICKS, scale.seeds[0]).settings().reference
    steps = own.steps if own.source == "bank" else MANY
    clean = f"clean samples of {steps} steps (caption of the figure)"
    return {
        LITERAL: ("reference.source=online", "reference.steps=1"),
        clean: ("reference.source=bank", f"reference.steps={steps}"),
        "text (later released code)": ("reference.source=data", *scale.text),
    }


def _asks(scale: Scale) -> Iterator[Ask]:
    yield from ask_method(scale, "teacher")
    for number, (line, overrides) in enumerate(readings(scale).items(), start=1):
        changed = replace(scale, ablation=(*scale.ablation, *overrides))
        for seed in scale.seeds:
            student = changed.ablated(ALL_TRICKS, seed)
            student = replace(student, name=f"reference-{number}-seed{seed}")
            name = f"measure-reference-{number}-seed{seed}"
            job = quality_job(scale, name, student, steps=scale.budgets, seed=seed)
            yield Ask(job, {"method": line, "role": "didi-plain"})


def _table(scale: Scale, results: Results) -> Table:
    rows = answers(_asks(scale), results)
    theirs = {WITHOUT_GUIDANCE: paper.LEAVE_ONE_OUT[WITHOUT_GUIDANCE]}
    return Table(
        title="The reference of Algorithm 1, read in three ways",
        rows=rows,
        shown=quality(scale),
        paper=printed(theirs, {WITHOUT_GUIDANCE: LITERAL}),
        notes=[
            *learnt(rows),
            f"One training (`{ALL_TRICKS}`) but for x', the texts that the discriminator takes for "
            f"the teacher's; all rows without guidance. {METHODS['teacher'].label} is where they "
            "begin.",
            "Algorithm 1 writes x' ~ p(z, t = 1), one step, as it does for x; the caption of its "
            "figure says clean samples; later released code takes text. One step draws all tokens "
            "at once: a student that matches such texts has unlearnt what holds tokens together.",
            "The paper's numbers are those of its student without guidance, by whichever reading.",
        ],
    )


REFERENCE_ITEMS = (
    Item(
        name="reference",
        title="The reference x' of Algorithm 1: one step, clean samples or text",
        where="Algorithm 1, and the caption of its figure",
        jobs=lambda scale: [ask.job for ask in _asks(scale)],
        table=_table,
    ),
)
