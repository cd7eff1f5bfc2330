"""Experiments on generated text: Figure 1, generation, the larger teacher, samples, diversity."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from didi_instruct.data.manifest import is_prepared
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.figures import draw_lines
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.lines import (
    Answers,
    Experiment,
    Line,
    ask_method,
    draw_quality,
    learnt,
    printed,
    quality,
)
from didi_instruct.reproduce.measure import quality_job
from didi_instruct.reproduce.methods import ALL_TRICKS, COMPARED, METHODS, labels
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PPL, Row, Shown, Table

UNMATCHED = (
    "Perplexity falls when entropy falls: two lines compare where their entropies agree. The item "
    "`baselines` compares at matched entropy (vsF)."
)
PATH = (
    "Path KL (nats a text, lower is better) bounds from above how far a sampler is from the law of "
    "the judge, whatever its temperature; guided samplers and those that rewrite tokens have none. "
    "A judge that is itself a model brings its own errors into it."
)
COST = (
    "NFE counts steps. RGAS takes more forward passes than steps (the last number): at equal "
    "passes a row stands beside the teacher's of more NFE."
)
UNREGULARISED, UNREGULARISED_FROM = "ablation-without-regularisation", 16
GAIN = Shown("gain", "perplexity below the teacher", ".1%")
BELOW_MOST = Shown("below_most", "below its most steps", ".1%")


def _figure_1(scale: Scale) -> Iterator[Line]:
    for role in COMPARED:
        more = {"teacher": (scale.most_steps,), "didi": scale.beyond}.get(role, ())
        yield from ask_method(scale, role, steps=(*scale.budgets, *more))


def _figure_1_table(scale: Scale, answers: Answers) -> Table:
    left_out = [m.label for role, m in METHODS.items() if role == "dimo" and not scale.has(role)]
    rows = answers.rows()
    lacking = [f"Not at this scale: {', '.join(left_out)}."] if left_out else []
    return Table(
        rows=rows,
        shown=quality(scale),
        paper=printed(paper.GENERATION, labels("teacher", "didi") | {"gpt2": METHODS["ar"].label}),
        notes=[*learnt(rows), UNMATCHED, PATH, COST, *lacking],
    )


def _generation(scale: Scale) -> Iterator[Line]:
    yield from ask_method(scale, "teacher", steps=(*scale.budgets, scale.most_steps))
    yield from ask_method(scale, "didi-plain")
    yield from ask_method(scale, "didi", steps=(*scale.budgets, *scale.beyond))


def _generation_table(scale: Scale, answers: Answers) -> Table:
    rows = answers.rows()
    return Table(
        rows=rows,
        shown=quality(scale),
        paper=printed(paper.GENERATION, labels("teacher", "didi")),
        notes=[*learnt(rows), UNMATCHED, PATH, COST],
    )


def _large(scale: Scale) -> Iterator[Line]:
    """Teacher and students of the larger size."""
    budgets = (*scale.budgets, *scale.large_beyond)
    for seed in scale.seeds:
        most = () if scale.most_steps in budgets else (scale.most_steps,)
        yield _ask_large(scale, "teacher", scale.model("teacher-large"), (*budgets, *most), seed)
        laws: dict[str, tuple[Job, list[int]]] = {}
        for nfe in budgets:
            student = scale.model("didi-large", seed, nfe)
            laws.setdefault(student.key, (student, []))[1].append(nfe)
        for student, steps in laws.values():
            yield _ask_large(scale, "didi", student, steps, seed)


def _ask_large(scale: Scale, role: str, model: Job, steps: Sequence[int], seed: int) -> Line:
    way = METHODS[role]
    job = quality_job(
        scale,
        f"measure-{role}-large-{steps[0]}-seed{seed}",
        model,
        steps=steps,
        seed=seed,
        sampler=way.sampler,
    )
    return Line(job, {"method": way.label, "role": f"{role}-large"})


def _scaling_table(scale: Scale, answers: Answers) -> Table:
    rows = answers.rows()
    teacher = {(r["nfe"], r["seed"]): r for r in rows if r["role"] == "teacher-large"}
    for row in (row for row in rows if row["role"] == "didi-large" and row["ppl"]):
        for one, nfe in ((GAIN, row["nfe"]), (BELOW_MOST, scale.most_steps)):
            rival = teacher.get((nfe, row["seed"]))
            if rival and rival["ppl"]:
                row[one.column] = 1 - row["ppl"] / rival["ppl"]
    theirs = printed(paper.SCALING, labels("teacher", "didi"))
    for row in theirs:
        if row["method"] == METHODS["didi"].label:
            row[GAIN.column] = paper.SCALING_GAIN.get(row["nfe"])
            row[BELOW_MOST.column] = paper.SCALING_BELOW_MOST.get(row["nfe"])
    return Table(
        title="A larger teacher (424M in the paper)",
        rows=rows,
        shown=(PPL, ENTROPY, GAIN, BELOW_MOST, PASSES),
        paper=theirs,
        notes=[
            "Perplexity below the teacher is the share by which the student's lies below the "
            f"teacher's at the same NFE, and below the teacher's at {scale.most_steps} (in the "
            "paper, 1,024).",
            "The paper draws the perplexities of its 424M models and prints one, 32.79 of the "
            "student at 16 NFE; the others here follow from it by the percentages that it prints: "
            "11.4% below the teacher's 1,024 NFE makes that 37.0, 56.8%, 61.2% and 64.2% below it "
            "make the student's 64, 128 and 1,024 NFE, and 87.7%, 82.7% and 79.0% below the "
            "teacher at the same NFE the teacher's 16, 64 and 128. Of 8 and 32 nothing follows.",
            scale.law,
            *learnt(rows),
            UNMATCHED,
            COST,
        ],
    )


def _samples(scale: Scale) -> Iterator[Line]:
    """Texts of the students that the paper shows: from 16 NFE on the one without regularisation."""
    yield from ask_method(scale, "teacher", steps=(scale.most_steps,), does="texts", named="texts")
    few = [nfe for nfe in scale.budgets if nfe < UNREGULARISED_FROM]
    many = [nfe for nfe in scale.budgets if nfe >= UNREGULARISED_FROM]
    for recipe, budgets in ((ALL_TRICKS, few), (UNREGULARISED, many)):
        if budgets:
            yield from ask_method(
                scale, "didi", steps=budgets, does="texts", named="texts", recipe=recipe
            )


def _samples_table(scale: Scale, answers: Answers) -> Table:
    rows = answers.rows()
    return Table(
        rows=[{k: v for k, v in row.items() if k != "texts"} for row in rows],
        paper=printed(paper.SAMPLES, labels("teacher", "didi")),
        notes=[
            "Texts are the first of each row's samples, not chosen.",
            f"From {UNREGULARISED_FROM} NFE on the student is that of the row w/o Regularization, "
            "whose perplexities the paper prints above its texts.",
            UNMATCHED,
        ],
        appendix="\n\n".join(_text(row, one) for row in rows for one in row.get("texts", ())),
    )


def _text(row: Row, one: Row) -> str:
    """A text under what it is and what it measures."""
    numbers = f"perplexity {one['ppl']:.2f}, " if one["ppl"] is not None else ""
    head = f"### {row['method']}, {row['nfe']} NFE, seed {row['seed']}"
    quoted = "\n".join(f"> {line}" for line in one["text"].splitlines() or [""])
    return f"{head}\n\n{numbers}entropy {one['entropy']:.2f}\n\n{quoted}"


GENERATION_ITEMS = (
    Experiment(
        name="figure-1",
        title="Perplexity against NFE, all methods",
        where="Figure 1",
        lines=_figure_1,
        table=_figure_1_table,
        draw=draw_quality,
    ),
    Experiment(
        name="generation",
        title="Generation results: perplexity with entropy",
        where='Section 4.1, "Generation results"',
        lines=_generation,
        table=_generation_table,
        draw=draw_quality,
    ),
    Experiment(
        name="scaling",
        title="A larger teacher: 424M parameters",
        where="Section 4.4 and its figure",
        lines=_large,
        table=_scaling_table,
        draw=draw_quality,
    ),
    Experiment(
        name="samples",
        title="Texts, with their perplexity and entropy",
        where='Appendix "Text examples"',
        lines=_samples,
        table=_samples_table,
    ),
)

MAUVE = Shown("mauve", "MAUVE", ".4f")
SELF_BLEU = Shown("self_bleu_words", "Self-BLEU of words", ".4f")
TOKENS = Shown("self_bleu", "Self-BLEU of tokens", ".4f")
UNIQUE = Shown("unique_4gram", "unique 4-grams", ".3f")


def about_mauve(scale: Scale) -> list[str]:
    """Notes on MAUVE: the reason for its absence, or a caveat."""
    if not scale.causal_judge:
        return ["MAUVE compares features of a causal LM, which the judge of this scale is not."]
    if not scale.mauve:
        return ["MAUVE was left out (--no-mauve)."]
    if scale.data is None or is_prepared(Path(scale.data)):
        return []
    return [
        "MAUVE compares with the first texts of --data, which models learnt too: it flatters those "
        "that know them by heart. Give data that `didi data prepare` has split."
    ]


def _variety(scale: Scale) -> Iterator[Line]:
    metrics = ["ppl", "entropy", "unique-4gram", "self-bleu", "self-bleu-words"]
    metrics += ["mauve"] if scale.measures_mauve else []
    for role in ("teacher", "sdtt", "duo", "didi"):
        yield from ask_method(scale, role, metrics=metrics, named="variety")


def _variety_table(scale: Scale, answers: Answers) -> Table:
    return Table(
        rows=answers.rows(),
        shown=(MAUVE, SELF_BLEU, TOKENS, UNIQUE, PPL, ENTROPY),
        paper=[
            {
                "method": METHODS[role].label,
                "nfe": nfe,
                "mauve": cell.mauve,
                SELF_BLEU.column: cell.self_bleu,
            }
            for role, line in paper.DIVERSITY.items()
            for nfe, cell in line.items()
        ],
        notes=[
            *about_mauve(scale),
            "MAUVE: scaling factor 5, first 256 tokens, features of the judge; higher is closer to "
            "text. Self-BLEU: 5-grams, smoothing 1, of words as NLTK's tokenizer cuts them (as the "
            "paper's; without its splitter of sentences, which is a download) and of the model's "
            "tokens; lower is more varied, and noise is varied too: read both with the perplexity.",
            "Both depend on the number of samples and on their length.",
            "The paper calls its MAUVE the highest everywhere; in its table MDLM's is at 16 NFE.",
        ],
    )


def _draw_variety(scale: Scale, table: Table, path: Path) -> None:
    caption = f"{scale.name} scale; {scale.samples} samples a row; seeds {scale.seed_list}"
    shown = [SELF_BLEU, TOKENS, UNIQUE, *([MAUVE] if scale.measures_mauve else [])]
    draw_lines(table, path, shown, paper=scale.name == "paper", caption=caption)


DIVERSITY_ITEMS = (
    Experiment(
        name="diversity",
        title="MAUVE and Self-BLEU",
        where='Appendix "Diversity and Fidelity Analysis", table',
        lines=_variety,
        table=_variety_table,
        draw=_draw_variety,
        packages=("mauve", "nltk"),
    ),
)
