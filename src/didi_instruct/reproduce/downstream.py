"""Experiments on downstream tasks (Section 4.3): MMLU and PubMed fine-tuned, MRPC from features.

Models that are compared are measured in one job, on the same questions, pairs or rows and under the
same noise, so that their differences have paired intervals.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from didi_instruct.data.dataset import TokenDataset, open_data
from didi_instruct.errors import UserError
from didi_instruct.model import load
from didi_instruct.reproduce import paper
from didi_instruct.reproduce.jobs import DATA, Context, Job
from didi_instruct.reproduce.lines import Answers, Experiment, Line
from didi_instruct.reproduce.methods import ALL_TRICKS, METHODS
from didi_instruct.reproduce.scale import Scale
from didi_instruct.reproduce.tables import Row, Shown, Table
from didi_instruct.reproduce.task_files import SAYS
from didi_instruct.tasks.baselines import untrained_of
from didi_instruct.tasks.registry import find_task
from didi_instruct.tasks.scoring import TOKENS
from didi_instruct.tasks.statistics import mean_interval
from didi_instruct.tasks.task import NamedModel
from didi_instruct.training.likelihood import check_data, nats_of_texts, perplexity
from didi_instruct.training.objectives import make_objective
from didi_instruct.training.run_data import PREPARED

BEFORE, AFTER = "before", "after"
"""Stages of a model; the roles of a job's inputs begin with them, where it has both."""
CACHE = "features"
"""Folder of frozen states, in that of the grid."""


def task(
    context: Context, *, which: str, labels: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Rows and notes of `didi eval --task` for the models among the inputs, by their labels."""
    chosen = find_task(which)
    options = {"cache": str(context.shared / CACHE)} if which == "mrpc" else {}
    report = chosen.evaluate(
        _models(context, labels),
        Path(context.inputs[DATA]),
        chosen.options(**settings, **options),
        lambda stage, done, total: context.tell(f"{stage} {done} of {total}"),
    )
    compared = report.tables["comparisons"]
    return {"rows": report.rows, "notes": report.notes, "compared": compared}


def adaptation(
    context: Context, *, labels: Mapping[str, str], sequences: int, draws: int, seed: int
) -> dict[str, Any]:
    """Likelihood of held-out documents before and after fine-tuning on the others.

    The rows are those that the fine-tuning runs have held out, all of them the same.
    """
    data = _held_out(context)
    count = min(sequences, data.num_sequences)
    models = _models(context, labels)
    nats: dict[str, np.ndarray] = {}
    rows = []
    for entry in (*models, *untrained_of(models, seed)):
        context.tell(f"likelihood under {entry.name}")
        nats[entry.name], row = _likelihood(entry, data, count, draws, seed)
        rows.append(row | {"seed": seed, "num_samples": count})
    compared = _compare({entry.name: nats[entry.name] for entry in models})
    return {"rows": rows, "notes": [], "compared": compared}


def _models(context: Context, labels: Mapping[str, str]) -> list[NamedModel]:
    """Models of the inputs whose roles have labels."""
    return [
        NamedModel(label, load(context.inputs[role], device=context.device))
        for role, label in labels.items()
    ]


def _held_out(context: Context) -> TokenDataset:
    """Rows that all fine-tuning runs have held out; runs that differ in them are refused."""
    runs = [source for role, source in context.inputs.items() if role.startswith(AFTER)]
    found = [open_data(Path(run) / PREPARED, "valid") for run in runs]
    for run, data in zip(runs, found, strict=True):
        if data.fingerprint != found[0].fingerprint:
            raise UserError(
                f"{run}: its fine-tuning held out other rows than that of {runs[0]}, so one "
                "may have learnt what the other is measured on: take models of one tokenizer and "
                "length."
            )
    return found[0]


def _likelihood(
    entry: NamedModel, data: TokenDataset, count: int, draws: int, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """Nats of each row, and the model's line of the table."""
    model = entry.model
    if model.tokenizer is None:
        raise UserError(f"{entry.name} brings no tokenizer: name the one it was trained with.")
    check_data(model.config, model.tokenizer.hash, data)
    objective = make_objective(model.config)
    nats, tokens = nats_of_texts(
        lambda batch: objective.loss(model.network, batch),
        model.config,
        data.ordered,
        sequences=count,
        draws=draws,
        batch_size=max(1, TOKENS // data.length),
        seed=seed,
        device=model.device,
    )
    per_token = nats / tokens.double().mean()
    mean, interval = float(per_token.mean()), mean_interval(per_token.numpy())
    row = {"model": entry.name, "nll": mean, "nelbo_ppl": perplexity(mean)}
    if interval is not None:
        row |= {"nll_ci95": interval, "nelbo_ppl_ci95": [perplexity(end) for end in interval]}
    return per_token.numpy(), row


def _compare(nats: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Paired differences in nats a token of every two models; `better` has fewer, if it is told."""
    found = []
    for first, second in combinations(nats, 2):
        difference = nats[first] - nats[second]
        interval = mean_interval(difference)
        if interval is not None:
            mean = float(difference.mean())
            told = (second if mean > 0 else first) if interval[0] * interval[1] > 0 else None
            pair: dict[str, Any] = {"models": [first, second], "difference": mean, "better": told}
            found.append(pair | {"difference_ci95": interval})
    return found


ACCURACY = Shown("accuracy", "accuracy", ".1%")
CHOICES = Shown("nll_choices", "NLL of 4", ".3f")
LETTER = Shown("nll", "NLL of all", ".3f")
NATS = Shown("nll", "nats a token", ".3f")
BOUND = Shown("nelbo_ppl", "perplexity", ".4g")
F1 = Shown("f1", "F1", ".1%")
INTERVALS = (
    "Intervals are over questions, pairs or rows of one training each: they do not hold what "
    "another seed of a distillation would change."
)
NONE_BY_TEST = "the paired interval holds 0, or McNemar's p is 0.05 or more"
NONE_BY_INTERVAL = "the paired interval holds 0"
WHERE = 'Section 4.3 and appendix "Downstream Task Evaluation", table'


def _roles(scale: Scale) -> list[str]:
    """The paper's models, and a left-to-right one where the scale has it."""
    return [role for role in ("teacher", "sdtt", "duo", "didi", "ar") if scale.has(role)]


def _models_by_role(scale: Scale, roles: list[str]) -> dict[str, Job | str]:
    """Models by role, which read streams of text."""
    seed = scale.seeds[0]
    readers = scale.readers or scale
    special: dict[str, Job | str] = {
        "teacher": readers.teacher,
        "didi": readers.ablated(ALL_TRICKS, seed),
    }
    return {role: special.get(role) or readers.model(role, seed) for role in roles}


def _data(scale: Scale, name: str) -> Job | str:
    if name not in scale.tasks:
        raise UserError(
            f"The item {name} at scale {scale.name} needs the task's files: give --tasks DIR, a "
            "folder with mmlu/, mrpc/ and pubmed.jsonl (docs/tasks.md)."
        )
    return scale.tasks[name]


def _tuned(scale: Scale, name: str, models: Mapping[str, Job | str]) -> dict[str, Job]:
    """A fine-tuning of each model by the recipe of a task."""
    return {
        role: Job(
            name=f"finetune-{name}-{role}",
            does="finetune",
            recipe=f"finetune-{name}",
            overrides=(*scale.finetuning.get(name, ()), f"train.seed={scale.seeds[0]}"),
            inputs={"model": model, DATA: _data(scale, name)},
        )
        for role, model in models.items()
    }


def _measured(
    scale: Scale, name: str, inputs: Mapping[str, Job | str], does: str, **options: Any
) -> Job:
    """The job that measures models by role; `labels` name them as the table does."""
    return Job(
        name=f"measure-{name}",
        does=does,
        inputs=dict(inputs),
        options={"labels": {role: _label(role) for role in inputs if role != DATA}, **options},
    )


def _label(role: str) -> str:
    """The name of a model: its method, and the stage where there are two."""
    stage, _, of = role.rpartition("-")
    return f"{METHODS[of].label} ({stage})" if stage else METHODS[of].label


def _both(scale: Scale, name: str) -> dict[str, Job | str]:
    """Models before and after fine-tuning, by stage and role."""
    models = _models_by_role(scale, _roles(scale))
    tuned = _tuned(scale, name, models)
    return {
        **{f"{BEFORE}-{role}": model for role, model in models.items()},
        **{f"{AFTER}-{role}": model for role, model in tuned.items()},
    }


def _settings(scale: Scale, name: str) -> dict[str, Any]:
    """All options of a task, defaults too, since the job's key has to change with them."""
    chosen = {"seed": scale.seeds[0], **scale.task_options.get(name, {})}
    options = asdict(find_task(name).options(**chosen))
    options.pop("cache", None)  # where states are kept, which decides nothing
    return options


def _mmlu(scale: Scale) -> Job:
    inputs = {**_both(scale, "mmlu"), DATA: _data(scale, "mmlu")}
    settings = _settings(scale, "mmlu")
    return _measured(scale, "mmlu", inputs, "task", which="mmlu", settings=settings)


def _pubmed(scale: Scale) -> Job:
    return _measured(
        scale,
        "pubmed",
        _both(scale, "pubmed"),
        "adaptation",
        sequences=scale.sequences,
        draws=8,
        seed=scale.seeds[0],
    )


def _mrpc(scale: Scale) -> Job:
    settings = _settings(scale, "mrpc")
    roles = [role for role in _roles(scale) if role != "duo"]  # as in the paper
    inputs = {**_models_by_role(scale, roles), DATA: _data(scale, "mrpc")}
    return _measured(scale, "mrpc", inputs, "task", which="mrpc", settings=settings)


def _named(row: Row, roles: Mapping[str, str]) -> Row:
    """A row by its method and stage; baselines stand in none."""
    stage, _, role = roles.get(row["model"], "").rpartition("-")
    method = METHODS[role].label if role else row["model"].replace(f" ({BEFORE})", "")
    facts = {"method": method, "stage": stage or None, "role": role or None}
    return row | facts | {"num_samples": row.get("num", row.get("num_samples"))}


def _differences(
    compared: list[Row], roles: Mapping[str, str], form: str, why_none: str
) -> list[str]:
    """Notes on paired intervals, one a model: what it is better than, and what it equals.

    Compared are models after fine-tuning, and each before and after it.
    """
    better: dict[str, list[str]] = {}
    same: dict[str, list[str]] = {}
    for pair in compared:
        first, second = pair["models"]
        (stage1, _, role1), (stage2, _, role2) = (
            roles.get(name, name).rpartition("-") for name in (first, second)
        )
        if BEFORE in (stage1, stage2) and role1 != role2:
            continue
        ends = pair["difference_ci95"]
        if pair["better"] is None:
            low, high = (format(end, form) for end in ends)
            same.setdefault(first, []).append(f"{second} [{low}, {high}]")
        else:
            low, high = (format(end, form) for end in sorted(map(abs, ends)))
            other = second if pair["better"] == first else first
            better.setdefault(pair["better"], []).append(f"{other} [{low}, {high}]")
    found = [
        f"{name} is better than (by, paired 95% interval): {'; '.join(others)}."
        for name, others in better.items()
    ]
    if same:
        found.append(f"No difference below: {why_none}; first minus second.")
        found += [f"{name} and: {'; '.join(others)}." for name, others in same.items()]
    return found


def _table(
    scale: Scale,
    answers: Answers,
    shown: tuple[Shown, ...],
    printed: list[Row],
    *,
    over: str,
    notes: tuple[str, ...],
) -> Table:
    found = answers.only({"rows": [], "notes": [], "compared": []})
    (line,) = answers.lines
    roles = {label: role for role, label in line.job.options["labels"].items()}
    rows = [_named(row, roles) for row in found["rows"]]
    told = ("+.1%", NONE_BY_TEST) if shown[0] == ACCURACY else ("+.3f", NONE_BY_INTERVAL)
    staged = any(row["stage"] for row in (*rows, *printed))
    return Table(
        rows=rows,
        labels=("method", "stage") if staged else ("method",),
        across=None,
        shown=shown,
        paper=printed,
        over=over,
        notes=[
            *notes,
            INTERVALS,
            *([SAYS] if scale.name == "toy" else []),
            *found["notes"],
            *_differences(found["compared"], roles, *told),
        ],
    )


def _mmlu_table(scale: Scale, answers: Answers) -> Table:
    printed = [
        {"method": METHODS[role].label, "stage": stage, "nll": nll, "accuracy": accuracy}
        for role, stages in paper.MMLU.items()
        for stage, (nll, accuracy) in zip((BEFORE, AFTER), stages, strict=True)
    ]
    return _table(
        scale,
        answers,
        (ACCURACY, CHOICES, LETTER),
        printed,
        over="questions",
        notes=(
            "Accuracy by the most likely of four letters; NLL of the right letter among the four "
            "(guessing: ln 4 = 1.386) and among all tokens.",
            "The paper's accuracies after fine-tuning are those of guessing (25%, ± 0.7 points "
            "over 14,042 questions), and before it lie below, which is a habit of choosing a "
            "letter. It does not say what its NLL is of: 2.81 lies above ln 4.",
        ),
    )


def _pubmed_table(scale: Scale, answers: Answers) -> Table:
    printed = [
        {"method": METHODS[role].label, "stage": stage, "nll": nll, "nelbo_ppl": ppl}
        for role, stages in paper.PUBMED.items()
        for stage, (nll, ppl) in zip((BEFORE, AFTER), stages, strict=True)
    ]
    return _table(
        scale,
        answers,
        (NATS, BOUND),
        printed,
        over="rows of text",
        notes=(
            "Perplexities of diffusion models are upper bounds (exp of the NELBO per token), that "
            "of AR is exact. All models read the same held-out rows under the same noise.",
            "The paper names neither the corpus (abstracts or articles) nor its split.",
        ),
    )


def _mrpc_table(scale: Scale, answers: Answers) -> Table:
    printed = [
        {"method": METHODS[role].label, "stage": None, "accuracy": accuracy, "f1": f1}
        for role, (accuracy, f1) in paper.MRPC.items()
    ]
    return _table(
        scale,
        answers,
        (ACCURACY, F1),
        printed,
        over="pairs and seeds of the head",
        notes=(
            "All rows of the paper lie below the answer `paraphrase` for every pair, which on its "
            "split (validation, 408 pairs) has accuracy 68.4% and F1 81.2%; a standard error there "
            "is 2.4 points.",
        ),
    )


DOWNSTREAM_ITEMS = (
    Experiment(
        name="mmlu",
        title="MMLU before and after fine-tuning",
        where=f"{WHERE} of MMLU",
        lines=lambda scale: [Line(_mmlu(scale))],
        table=_mmlu_table,
    ),
    Experiment(
        name="pubmed",
        title="Adaptation to PubMed",
        where=f"{WHERE} of PubMed",
        lines=lambda scale: [Line(_pubmed(scale))],
        table=_pubmed_table,
    ),
    Experiment(
        name="mrpc",
        title="Paraphrases (MRPC) from frozen features",
        where=f"{WHERE} of MRPC",
        lines=lambda scale: [Line(_mrpc(scale))],
        table=_mrpc_table,
    ),
)
