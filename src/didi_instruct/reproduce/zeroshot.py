"""The zero-shot table: likelihood of seven corpora under teacher and student, beside the paper's.

Perplexities depend on the tokenizer, the training text and the size of a model, so those of small
models say nothing beside the paper's. What can be compared at any scale is what distillation cost:
the student's perplexity over its teacher's, `ratio_to_teacher`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from didi_instruct.evaluation.measuring import Row
from didi_instruct.evaluation.text_likelihood import Progress, evaluate_zero_shot
from didi_instruct.reproduce.minutes import learning
from didi_instruct.reproduce.paper import CORPORA, ZERO_SHOT

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
    """What distillation cost each student, as the geometric mean over corpora."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["ratio_to_teacher"] is not None:
            found.setdefault(row["method"], []).append(math.log(row["ratio_to_teacher"]))
    return {name: math.exp(math.fsum(logs) / len(logs)) for name, logs in found.items()}


def _plain(source: str) -> str:
    """A file by its name: where it lay on this machine says nothing to a reader."""
    return source if source.startswith("hf:") else Path(source).name
