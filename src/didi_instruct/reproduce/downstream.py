"""Functions that jobs call for the tables of downstream tasks (Section 4.3).

Models that are compared are measured in one job, on the same questions, pairs or rows and under the
same noise, so that their differences have paired intervals.
"""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from didi_instruct.data.dataset import TokenDataset, open_data
from didi_instruct.errors import UserError
from didi_instruct.model import load
from didi_instruct.reproduce.jobs import DATA, Context
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
