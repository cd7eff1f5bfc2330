"""Items on other measures: variety, latency, zero-shot likelihood, rivals on equal terms."""

from collections.abc import Iterator
from pathlib import Path

from didi_instruct.data.manifest import is_prepared
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.asking import ALL_TRICKS, METHODS, Ask, answers, ask_method, learnt
from didi_instruct.reproduce.figures import draw_lines
from didi_instruct.reproduce.items import Item, Results
from didi_instruct.reproduce.jobs import Job
from didi_instruct.reproduce.latency import untimed
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import ENTROPY, PASSES, PPL, Shown, Table
from didi_instruct.reproduce.toy_corpora import SAYS
from didi_instruct.reproduce.zeroshot import NOTES, mean_ratios, paper_rows

MAUVE = Shown("mauve", "MAUVE", ".4f")
SELF_BLEU = Shown("self_bleu_words", "Self-BLEU of words", ".4f")
TOKENS = Shown("self_bleu", "Self-BLEU of tokens", ".4f")
UNIQUE = Shown("unique_4gram", "unique 4-grams", ".3f")


def about_mauve(scale: Scale) -> list[str]:
    """Why a table has no MAUVE, or what to know of it."""
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


def _variety(scale: Scale) -> Iterator[Ask]:
    metrics = ["ppl", "entropy", "unique-4gram", "self-bleu", "self-bleu-words"]
    metrics += ["mauve"] if scale.measures_mauve else []
    for role in ("teacher", "sdtt", "duo", "didi"):
        yield from ask_method(scale, role, metrics=metrics, named="variety")


def _variety_table(scale: Scale, results: Results) -> Table:
    return Table(
        rows=answers(_variety(scale), results),
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


def _draw_variety(scale: Scale, table: Table, results: Results, path: Path) -> None:
    caption = f"{scale.name} scale; {scale.samples} samples a row; seeds {scale.seed_list}"
    shown = [SELF_BLEU, TOKENS, UNIQUE, *([MAUVE] if scale.measures_mauve else [])]
    draw_lines(table, path, shown, paper=scale.name == "paper", caption=caption)


SPEEDS = (
    Shown("nfe", "NFE", ".0f"),
    PASSES,
    Shown("tokens_per_second", "tokens/s", ",.0f"),
    Shown("seconds_per_1k", "s per 1,024 tokens", ".3g"),
    Shown("ratio_to_ar", "times AR", ".2f"),
    PPL,
    ENTROPY,
)
GREEDY, GREEDY_LABEL = "ar-greedy", f"{METHODS['ar'].label}, greedy"
"""The role of the left-to-right model that takes the most probable token, as the paper's does."""


def _latency(scale: Scale) -> Job:
    """Time of one machine: its name is part of what decides the numbers."""
    seed, known = scale.seeds[0], provenance()
    roles = {role: nfe for role, nfe in scale.latency.items() if role != "ar" or scale.has("ar")}
    greedy = {GREEDY: roles["ar"]} if "ar" in roles else {}
    models: dict[str, Job | str] = {
        "teacher": scale.teacher,
        "didi": scale.ablated(ALL_TRICKS, seed, scale.latency["didi"]),
    }
    others = {role: scale.model(role, seed) for role in roles if role not in models}
    return Job(
        name="latency",
        does="latency",
        timed=True,
        inputs={**models, **others, "judge": scale.judge},
        options={
            "steps": greedy | roles,
            "labels": {role: METHODS[role].label for role in roles}
            | dict.fromkeys(greedy, GREEDY_LABEL),
            "guidance": dict(scale.guidance),
            "samplers": {role: METHODS[role].sampler for role in roles},
            "batch": scale.latency_batch,
            "rounds": 5,
            "machine": known.get("GPU", known["CPU"]),
            "fast": True,
            **scale.drawing(seed),
        },
    )


def _latency_table(scale: Scale, results: Results) -> Table:
    rows = results.get(_latency(scale).key, [])
    ar = next((row["tokens_per_second"] for row in rows if row["role"] == GREEDY), None)
    theirs = paper.LATENCY["ar"].tokens_per_second
    return Table(
        rows=[row | {"ratio_to_ar": _over(row["tokens_per_second"], ar)} for row in rows],
        across=None,
        shown=SPEEDS,
        paper=[
            {
                "method": GREEDY_LABEL if role == "ar" else METHODS[role].label,
                **speed._asdict(),
                "ratio_to_ar": speed.tokens_per_second / theirs,
            }
            for role, speed in paper.LATENCY.items()
        ],
        notes=[
            f"Batches of {scale.latency_batch}, after a warm-up the median of five rounds in which "
            "all take turns. On a GPU models are accelerated (`--fast`): passes are compiled and "
            "captured, AR has a static cache; RGAS counts with its discriminator, which is "
            "compiled alone.",
            "AR is timed greedy, as in the paper and as what the others are compared with, and "
            "sampled as the others are: greedy texts have no variety to compare.",
            "The paper compares at matched perplexity, on an H100 in bfloat16. Speeds of two "
            "machines or two sizes do not compare: read rows of one table.",
            *untimed(rows),
        ],
    )


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


LIKELIHOOD = (Shown("nelbo_ppl", "perplexity", ".4g"), Shown("ratio_to_teacher", "over teacher"))


def _zero_shot(scale: Scale) -> Job:
    seed = scale.seeds[0]
    toy = scale.judge == "oracle"  # its sentences have no corpora: stand-ins
    student = METHODS["jump" if toy else "didi"].label  # the recipe of letters is the jump variant
    reads = scale.reader is None and not toy
    roles = ["teacher", "didi", *(["ar"] if reads else [])]
    roles += [role for role in ("duo-teacher", "duo") if reads and scale.has(role)]
    inputs: dict[str, Job | str] = {}
    if not toy:
        teacher = scale.teacher if scale.reader is None else scale.reader
        inputs = {
            "teacher": teacher,
            "didi": scale.ablated(ALL_TRICKS, seed, teacher=teacher),
        }
        inputs |= {role: scale.model(role, seed) for role in roles[2:]}
        inputs |= {"corpora": scale.corpora} if scale.corpora else {}
    return Job(
        name="zero-shot",
        does="toy_zero_shot" if toy else "zero_shot",
        inputs=inputs,
        options={
            "labels": {role: METHODS[role].label for role in roles} | {"didi": student},
            "teachers": {student: METHODS["teacher"].label}
            | ({METHODS["duo"].label: METHODS["duo-teacher"].label} if "duo" in roles else {}),
            "sequences": scale.sequences,
            "seed": seed,
        },
    )


def _zero_shot_table(scale: Scale, results: Results) -> Table:
    rows = [
        row | {"num_samples": row["num_sequences"]}
        for row in results.get(_zero_shot(scale).key, [])
    ]
    names = {"MDLM": "teacher", "DiDi-Instruct": "didi", "DUO base": "duo-teacher"}
    names |= {"DUO distilled": "duo"}
    theirs = [
        row | {"method": METHODS[names[name]].label if name in names else f"{name}, as printed"}
        for row in paper_rows()
        for name in [row["method"]]
    ]
    costs = [
        f"{name}: perplexity is {ratio:.3f} times its teacher's (geometric mean over corpora)."
        for name, ratio in mean_ratios(rows).items()
    ]
    return Table(
        rows=rows,
        across="corpus",
        across_title="",
        shown=LIKELIHOOD,
        paper=theirs,
        notes=[
            *learnt(rows),
            *costs,
            *NOTES,
            *([SAYS] if scale.judge == "oracle" else []),
            *_reader_note(scale),
        ],
    )


def _reader_note(scale: Scale) -> list[str]:
    if scale.reader is None or scale.judge == "oracle":
        return []
    return [
        "Corpora are streams of text: teacher and student here read streams, and are others than "
        "in the tables on generation where those read one text a window."
    ]


MEASURE_ITEMS = (
    Item(
        name="diversity",
        title="MAUVE and Self-BLEU",
        where='Appendix "Diversity and Fidelity Analysis", table',
        jobs=lambda scale: [ask.job for ask in _variety(scale)],
        table=_variety_table,
        figure=_draw_variety,
    ),
    Item(
        name="latency",
        title="Latency and throughput",
        where='Appendix "Practical Latency and Throughput Analysis", table',
        jobs=lambda scale: [_latency(scale)],
        table=_latency_table,
    ),
    Item(
        name="zero-shot",
        title="Zero-shot perplexity on seven corpora",
        where='Appendix "Results on zero-shot perplexities", table',
        jobs=lambda scale: [_zero_shot(scale)],
        table=_zero_shot_table,
    ),
)
