"""Experiment on zero-shot likelihood: seven corpora under teacher and student.

Perplexities depend on the tokenizer, the training text and the size of a model, so those of small
models cannot be compared with the paper's. The cost of distillation can be at any scale: the
student's perplexity over its teacher's, `ratio_to_teacher`.

The package holds no corpus. At toy scale sentences of the oracle language are written in the form
of each corpus (tokenised, with headings, as records) and go through the same readers,
detokenisers and packing; their perplexities mean nothing.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from didi_instruct.data.files import write_atomic
from didi_instruct.distill import distill
from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.text_likelihood import Progress, evaluate_zero_shot
from didi_instruct.pretrain import pretrain
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.lines import Answers, Experiment, Line, learnt
from didi_instruct.reproduce.measure import EVALS, Rows, progress_of
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.minutes import learning
from didi_instruct.reproduce.paper import CORPORA, ZERO_SHOT
from didi_instruct.reproduce.running import StoppedError
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import Shown, Table
from didi_instruct.reproduce.task_files import sentences

TEACHERS = {"DiDi-Instruct": "MDLM", "DUO distilled": "DUO base"}
"""Students of the paper's table, and what they were distilled from (or the nearest to it)."""
NOTES = (
    "Perplexities of diffusion models are upper bounds (exp of the NELBO per token).",
    "In the paper all but DiDi-Instruct and DUO distilled are numbers of other papers, so the MDLM "
    "of its table is not its own teacher.",
    "PubMed and arXiv are abstracts in local files, whole articles on the hub, as in the field.",
)


def zero_shot_rows(
    models: Mapping[str, str],
    *,
    out: Path,
    teacher_of: Mapping[str, str] | None = None,
    data: str | Path | None = None,
    sequences: int = 1024,
    draws: int = 8,
    seed: int = 0,
    device: str | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """A row for each model and corpus; `models` are SOURCEs by the name of their line.

    `teacher_of` names, for a student's line, that of its teacher. `data` is a folder of the
    corpora's files, None the hub.
    """
    report = evaluate_zero_shot(
        list(models.values()),
        out=out,
        data=data,
        sequences=sequences,
        draws=draws,
        seed=seed,
        device=device,
        progress=progress,
    )
    names = {source: name for name, source in models.items()}
    rows: list[Row] = [
        row
        | {"method": names[row["model"]], "model": None, "source": _plain(row["source"])}
        | learning(Path(row["model"]))
        for row in report.rows
    ]
    return with_ratios(rows, teacher_of or {})


def paper_rows() -> list[Row]:
    """The paper's table in the same form."""
    rows: list[Row] = [
        {"method": method, "family": row.family, "corpus": corpus, "nelbo_ppl": ppl}
        for method, row in ZERO_SHOT.items()
        for corpus, ppl in zip(CORPORA, row.ppl, strict=True)
    ]
    return with_ratios(rows, TEACHERS)


def with_ratios(rows: Sequence[Row], teacher_of: Mapping[str, str]) -> list[Row]:
    """Rows of students with `ratio_to_teacher`; below 1 the student has the better likelihood."""
    found = {(row["method"], row["corpus"]): row["nelbo_ppl"] for row in rows}

    def ratio(row: Row) -> float | None:
        rival = found.get((teacher_of.get(row["method"], ""), row["corpus"]))
        return row["nelbo_ppl"] / rival if rival and row["nelbo_ppl"] else None

    return [row | {"ratio_to_teacher": ratio(row)} for row in rows]


def mean_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Perplexity of each student over its teacher's, as the geometric mean over corpora."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["ratio_to_teacher"] is not None:
            found.setdefault(row["method"], []).append(math.log(row["ratio_to_teacher"]))
    return {name: math.exp(math.fsum(logs) / len(logs)) for name, logs in found.items()}


def _plain(source: str) -> str:
    """A file by its name: where it lay on this machine says nothing to a reader."""
    return source if source.startswith("hf:") else Path(source).name


SAYS = (
    "At toy scale there is no corpus: the seven are sentences of the oracle language, written in "
    "each corpus's form, under models of letters that were trained for seconds."
)
MODEL = (
    "model.length=64", "model.hidden=64", "model.learned_positions=false", "data.tokenizer=bytes",
    "train.batch_size=16", "train.eval_sequences=16", "optim.warmup=10",
)  # fmt: skip
STUDENT = (
    "train.batch_size=16", "train.eval_every=0", "train.eval_sequences=16", "train.ema=0.9",
    "watch.budgets=[]", "reference.rows=128", "reference.steps=16", "discriminator.warmup=5",
    "discriminator.chance=0",  # in so few steps it is always at chance, and the student would wait
)  # fmt: skip


def write_text(path: Path, num: int = 2000) -> None:
    """Text to learn from: a paragraph of a few sentences on each line."""
    found = sentences(num)
    lines = [". ".join(found[i : i + 4]) + "." for i in range(0, num, 4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def write_corpora(folder: Path, num: int = 64) -> None:
    """The seven files, `num` documents each, no two of the same sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, form) in enumerate(FORMS.items()):
        texts = sentences(num, seed=1 + number)
        write_atomic(folder / name, form(texts).encode())


def _lines(form: str) -> Callable[[Sequence[str]], str]:
    return lambda texts: "".join(form.format(text) for text in texts)


def _records(field: str) -> Callable[[Sequence[str]], str]:
    return lambda texts: "".join(json.dumps({field: f"{text}."}) + "\n" for text in texts)


def _rows(texts: Sequence[str]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows(("1", text.split()[0].title(), f"{text}.") for text in texts)
    return file.getvalue()


FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "ptb.test.txt": lambda texts: _lines(" {} <unk> N \n")([text.lower() for text in texts]),
    "wikitext.test.raw": _lines(" = A title = \n\n {} , well @-@ known . \n"),
    "lm1b.test.txt": _lines("{} .\n"),
    "lambada.test.jsonl": _records("text"),
    "ag_news.test.csv": _rows,
    "pubmed.jsonl": _records("text"),
    "arxiv.jsonl": _records("abstract"),
}
"""By the name of the file, what stands in it."""


def toy_models(folder: Path, *, steps: int = 120, device: str | None = None) -> dict[str, str]:
    """A teacher of letters and a student of it, trained here; what is finished stays."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    teacher, student = folder / "teacher", folder / "student"
    data = (f"data.source={text}", "data.documents=line")
    trained = pretrain(
        "oracle-teacher",
        out=teacher,
        overrides=[*MODEL, *data, f"train.steps={steps}"],
        resume=teacher.exists(),
        device=device,
    )
    if trained.outcome.signal is not None:
        raise StoppedError(trained.outcome.signal)
    distilled = distill(
        "oracle-didi",
        teacher=teacher,
        out=student,
        overrides=[*STUDENT, *data, f"train.steps={max(6, steps // 6)}"],
        resume=student.exists(),
        device=device,
    )
    if distilled.outcome.signal is not None:
        raise StoppedError(distilled.outcome.signal)
    return {"teacher": str(teacher), "student": str(student)}


def zero_shot(context: Context, **asked: Any) -> Rows:
    """Likelihood of the corpora under the models in `labels`, which are inputs by role."""
    return _zero_shot(context, context.inputs, context.inputs.get("corpora"), **asked)


def toy_zero_shot(context: Context, **asked: Any) -> Rows:
    """The zero-shot table without corpora: stand-ins, and models of letters that can read them."""
    corpora = context.folder / "corpora"
    write_corpora(corpora)
    found = toy_models(context.folder, device=context.device)
    return _zero_shot(
        context, {"teacher": found["teacher"], "didi": found["student"]}, corpora, **asked
    )


def _zero_shot(
    context: Context,
    sources: Mapping[str, str],
    corpora: str | Path | None,
    *,
    labels: Mapping[str, str],
    teachers: Mapping[str, str],
    sequences: int,
    seed: int,
) -> Rows:
    return zero_shot_rows(
        {label: sources[role] for role, label in labels.items()},
        out=context.shared / EVALS,
        teacher_of=teachers,
        data=corpora,
        sequences=sequences,
        seed=seed,
        device=context.device,
        progress=progress_of(context),
    )


LIKELIHOOD = (Shown("nelbo_ppl", "perplexity", ".4g"), Shown("ratio_to_teacher", "over teacher"))


def _zero_shot_job(scale: Scale) -> Job:
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


def _zero_shot_table(scale: Scale, answers: Answers) -> Table:
    rows = [row | {"num_samples": row["num_sequences"]} for row in answers.rows()]
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


ZERO_SHOT_ITEMS = (
    Experiment(
        name="zero-shot",
        title="Zero-shot perplexity on seven corpora",
        where='Appendix "Results on zero-shot perplexities", table',
        lines=lambda scale: [Line(_zero_shot_job(scale))],
        table=_zero_shot_table,
    ),
)
