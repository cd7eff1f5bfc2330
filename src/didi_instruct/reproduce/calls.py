"""Functions that jobs call for the tables with many settings of one model.

They are thin: what is measured is in `landscape`, `sensitivity`, `latency`, `zeroshot` and
`baselines`; what comes back is plain rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from didi_instruct.evaluation.measuring import Progress
from didi_instruct.evaluation.provenance import provenance
from didi_instruct.reproduce.baselines import LATE, settings_of, way_rows
from didi_instruct.reproduce.costs import NO_MODELS
from didi_instruct.reproduce.equal_terms import WHOLE, Setting, Terms
from didi_instruct.reproduce.jobs import Context
from didi_instruct.reproduce.landscape import Strength, grid, guided_rows
from didi_instruct.reproduce.latency import latency_rows, time_settings
from didi_instruct.reproduce.measuring import EVALS, judge_of
from didi_instruct.reproduce.sensitivity import design, shares
from didi_instruct.reproduce.toy_corpora import toy_models, write_corpora
from didi_instruct.reproduce.zeroshot import zero_shot_rows
from didi_instruct.training.distributed import pick_device

SWEEP = ("most_steps", "late_from", "few", "costly", "temperatures", "top_ps")
"""What is drawn of each way to sample, beside the budgets."""
Rows = list[dict[str, Any]]


def terms_of(
    context: Context,
    *,
    num: int,
    seed: int,
    batch_size: int,
    until_eot: bool,
    judging: Mapping[str, Any],
    metrics: Sequence[str] = ("ppl", "entropy"),
    part: Sequence[int] = WHOLE,
) -> Terms:
    """What all rows of a job share; a part of it draws and measures some of them."""
    return Terms(
        out=context.shared / EVALS,
        judge=judge_of(context, judging),
        metrics=tuple(metrics),
        num=num,
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
        reference=context.inputs.get("reference"),
        part=(part[0], part[1]),
        device=context.device,
        progress=_teller(context),
    )


def _teller(context: Context) -> Progress:
    return lambda stage, done, total: context.tell(f"{stage.lower()} {done} of {total}")


def landscape(
    context: Context,
    *,
    scales: Sequence[float],
    candidates: Sequence[int],
    steps: Sequence[int],
    late_from: int | None = None,
    guidance: Mapping[str, Any] | None = None,
    **common: Any,
) -> Rows:
    """RGAS over all pairs of h and M."""
    terms = terms_of(context, **common)
    return _guided(context, grid(scales, candidates), steps, late_from, guidance, terms)


def anova(
    context: Context,
    *,
    points: int,
    scales: Sequence[float],
    candidates: Sequence[int],
    steps: Sequence[int],
    late_from: int | None = None,
    guidance: Mapping[str, Any] | None = None,
    **common: Any,
) -> dict[str, Rows]:
    """RGAS over a Latin hypercube of h and M, and the share of the variance of each."""
    ranges: Any = (tuple(scales), tuple(candidates))
    terms = terms_of(context, **common)
    strengths = design(points, common["seed"], *ranges)
    rows = _guided(context, strengths, steps, late_from, guidance, terms)
    known = [] if terms.part != WHOLE else shares(rows, *ranges, seed=common["seed"])
    return {"rows": rows, "shares": known}


def _guided(
    context: Context,
    strengths: Sequence[Strength],
    steps: Sequence[int],
    late_from: int | None,
    guidance: Mapping[str, Any] | None,
    terms: Terms,
) -> Rows:
    """Rows of each budget's own student: `model`, or `model-late` from `late_from` NFE on."""
    few = [nfe for nfe in steps if late_from is None or nfe < late_from]
    many = [nfe for nfe in steps if nfe not in few]
    return [
        row
        for role, budgets in (("model", few), (f"model{LATE}", many))
        if budgets
        for row in guided_rows(context.inputs[role], strengths, budgets, terms, guidance)
    ]


def latency(
    context: Context,
    *,
    steps: Mapping[str, int],
    labels: Mapping[str, str],
    samplers: Mapping[str, str | None],
    guidance: Mapping[str, Any],
    batch: int,
    rounds: int,
    machine: str,
    fast: bool,
    **common: Any,
) -> Rows:
    """Time and quality of the models in `steps`, which are inputs by role; `machine` is told only.

    A role that ends in `-greedy` is that model without chance; `guidance` are options of RGAS. On a
    GPU bfloat16 is timed, as in the paper; with `fast`, of accelerated models.
    """
    half = pick_device(context.device).type == "cuda"
    settings = [
        Setting(
            method=labels[role],
            source=context.inputs[role.removesuffix("-greedy")],
            steps=None if role.startswith("ar") else nfe,
            sampler=samplers.get(role),
            options=guidance if samplers.get(role) == "rgas" else {},
            temperature=0.0 if role.endswith("-greedy") else 1.0,
            more={"role": role, "machine": machine},
        )
        for role, nfe in steps.items()
    ]
    dtype = torch.bfloat16 if half else None
    terms = terms_of(context, **common)
    return latency_rows(settings, terms, batch=batch, rounds=rounds, dtype=dtype, fast=fast)


def zero_shot(context: Context, **asked: Any) -> Rows:
    """Likelihood of the corpora under the models in `labels`, which are inputs by role."""
    return _zero_shot(context, context.inputs, context.inputs.get("corpora"), **asked)


def toy_zero_shot(context: Context, **asked: Any) -> Rows:
    """The same where there is no corpus: stand-ins, and models of letters that can read them."""
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
        progress=_teller(context),
    )


def way(context: Context, *, method: str, steps: Sequence[int], **asked: Any) -> Rows:
    """One way to sample one model, over temperature and top-p, with the numbers of each sample."""
    sweep = {name: asked.pop(name) for name in SWEEP}
    models = {role: source for role, source in context.inputs.items() if role not in NO_MODELS}
    return way_rows(method, models, steps, terms_of(context, **asked), **sweep)


def speeds(
    context: Context, *, methods: Sequence[str], steps: Sequence[int], until_eot: bool, **more: Any
) -> Rows:
    """Tokens per second of plain settings, in turns: temperature and top-p do not change them."""
    settings = settings_of(context.inputs, steps, methods=methods, **more)
    rows = time_settings(settings, rounds=3, device=context.device, until_eot=until_eot)
    known = provenance()
    told = ("method", "steps", "tokens_per_second", "tokens_per_second_note")
    machine = {"machine": known.get("GPU", known["CPU"])}
    return [{name: row.get(name) for name in told} | machine for row in rows]
