"""Experiments on the tricks (Tables 1 and 2) and on the reference x' of Algorithm 1."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from didi_instruct.reproduce import paper
from didi_instruct.reproduce.lines import (
    Answers,
    Experiment,
    Line,
    ablated,
    ask_method,
    draw_quality,
    learnt,
    printed,
    quality,
)
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import PATH_KL, Row, Shown, Table

GUIDED = {"ablation-cumulative-6-guidance", "ablation-all-tricks"}
ALSO_GUIDED = "ablation-without-"
"""Rows sampled by RGAS: all of Table 2 but the one without it, the last of Table 1."""
UNGUIDED = Shown("unguided_path_kl", "path KL, unguided", ".2f")
PLAIN = {UNGUIDED.column: "path_kl", f"{UNGUIDED.column}_ci95": "path_kl_ci95"}


def sampler_of(recipe: str) -> str:
    """Sampler of a row of Tables 1 and 2."""
    guided = recipe in GUIDED or recipe.startswith(ALSO_GUIDED)
    return "rgas" if guided and recipe != "ablation-without-guidance" else "ancestral"


def asks(numbers: Mapping[str, paper.Printed], scale: Scale) -> Iterator[Line]:
    """Rows of an ablation table, for all seeds."""
    for recipe, line in numbers.items():
        for seed in scale.seeds:
            for student, steps in ablated(scale, recipe, seed, scale.budgets):
                job = quality_job(
                    scale,
                    f"measure-{recipe}-{steps[0]}-seed{seed}",
                    student,
                    steps=steps,
                    seed=seed,
                    sampler=sampler_of(recipe),
                )
                yield Line(job, {"method": line.label, "recipe": recipe})


def unguided(numbers: Mapping[str, paper.Printed], scale: Scale) -> Iterator[Line]:
    """Lines of the students without guidance, which path KL needs; none where it is not shown."""
    if PATH_KL not in quality(scale):
        return
    for recipe, line in numbers.items():
        for seed in scale.seeds:
            for student, steps in ablated(scale, recipe, seed, scale.budgets):
                name = f"unguided-{recipe}-{steps[0]}-seed{seed}"
                job = quality_job(scale, name, student, steps=steps, seed=seed, sampler="ancestral")
                yield Line(job, {"method": line.label, "recipe": recipe}, UNGUIDED.column)


def with_unguided(rows: Sequence[Row], plain: Sequence[Row]) -> list[Row]:
    """Rows with the path KL of their student without guidance."""
    found = {(row["recipe"], row["nfe"], row["seed"]): row for row in plain}
    return [
        row | _plain_path(found.get((row["recipe"], row["nfe"], row["seed"]), {})) for row in rows
    ]


def _plain_path(row: Row) -> Row:
    return {mine: row.get(theirs) for mine, theirs in PLAIN.items()}


def _ablation_lines(numbers: Mapping[str, paper.Printed], scale: Scale) -> Iterator[Line]:
    for line in ask_method(scale, "teacher"):
        yield replace(line, group="teacher")
    yield from asks(numbers, scale)
    yield from unguided(numbers, scale)


def _ablation_table(numbers: Mapping[str, paper.Printed], scale: Scale, answers: Answers) -> Table:
    plain = answers.rows(UNGUIDED.column)
    rows = with_unguided(answers.rows(), plain)
    teacher = [row | _plain_path(row) for row in answers.rows("teacher")]
    return Table(
        rows=[*teacher, *rows],
        shown=tuple(UNGUIDED if one == PATH_KL else one for one in quality(scale)),
        paper=printed(numbers, {}),
        notes=[
            *learnt(rows),
            "Rows that differ in guidance alone are one training, sampled in two ways.",
            scale.law,
            "A difference between rows is one of perplexity only where entropies agree; rows with "
            "guidance also cost more passes.",
            *(["Path KL is that of the same student without guidance."] if plain else []),
        ],
    )


def _item(name: str, title: str, where: str, numbers: Mapping[str, paper.Printed]) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        where=where,
        lines=partial(_ablation_lines, numbers),
        table=partial(_ablation_table, numbers),
        draw=draw_quality,
    )


ABLATION_ITEMS = (
    _item("ablation-cumulative", "Cumulative ablation", "Table 1", paper.CUMULATIVE),
    _item("ablation-leave-one-out", "Leave-one-out ablation", "Table 2", paper.LEAVE_ONE_OUT),
)

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


def _reference_lines(scale: Scale) -> Iterator[Line]:
    yield from ask_method(scale, "teacher")
    for number, (line, overrides) in enumerate(readings(scale).items(), start=1):
        changed = replace(scale, ablation=(*scale.ablation, *overrides))
        for seed in scale.seeds:
            student = changed.ablated(ALL_TRICKS, seed)
            student = replace(student, name=f"reference-{number}-seed{seed}")
            name = f"measure-reference-{number}-seed{seed}"
            job = quality_job(scale, name, student, steps=scale.budgets, seed=seed)
            yield Line(job, {"method": line, "role": "didi-plain"})


def _reference_table(scale: Scale, answers: Answers) -> Table:
    rows = answers.rows()
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
    Experiment(
        name="reference",
        title="The reference x' of Algorithm 1: one step, clean samples or text",
        where="Algorithm 1, and the caption of its figure",
        lines=_reference_lines,
        table=_reference_table,
    ),
)
