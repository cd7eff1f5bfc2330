"""Mistakes in an evaluation that can be known before anything is drawn."""

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec

from didi_instruct.api.candidates import Candidate, candidates
from didi_instruct.api.evaluate import held_out
from didi_instruct.api.generation import Request
from didi_instruct.api.quality import Plan
from didi_instruct.api.samplers import find_sampler
from didi_instruct.config.parse import parse
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.fitting import FEWEST_SAMPLES
from didi_instruct.evaluation.judges import CausalJudge, Judge
from didi_instruct.evaluation.likelihood import check_data
from didi_instruct.evaluation.token_judges import TokenJudge

FEWEST = {"ar-kl": FEWEST_SAMPLES, "c2st": FEWEST_SAMPLES}
"""Samples that a metric cannot do without."""


def check_models(
    sources: Sequence[str],
    against: str | None,
    plan: Plan,
    reference: str | None,
    reading: ReadOptions,
) -> list[Candidate]:
    """Refuse models that are missing, that do not belong into one table or cannot draw the plan.

    A baseline that cannot be sampled as the others is sampled plainly: its sampler is not checked.
    """
    wish = next(plan.requests())
    found = candidates([*sources, *([against] if against else [])])
    for model in found:
        if wish.length is not None and wish.length > model.config.length:
            raise UserError(
                f"--length {wish.length}: {model.source} writes 1 to {model.config.length} tokens."
            )
        if model.source in sources:
            sampler = find_sampler(plan.sampler, model.config.kind)
            if plan.options and not fields(sampler.options):
                raise UserError(f"`{sampler.name}` has no options.")
            parse(sampler.options, dict(plan.options), where=f"sampler {sampler.name}")
    if found and reference is not None:
        _check_reference(reference, found[-1], wish, reading)
    return found


def _check_reference(data: str, model: Candidate, wish: Request, reading: ReadOptions) -> None:
    """Refuse text that cannot be read, or that has other tokens or shorter rows than samples."""
    rows = held_out(model, data, wish.num, reading)
    check_data(model.config, model.tokenizer_hash, rows)
    if rows.length < (wish.length or model.config.length):
        raise UserError(
            f"{data} has rows of {rows.length} tokens, fewer than the samples: draw them with "
            f"--length {rows.length}."
        )


def check_needs(
    metrics: Sequence[str], plan: Plan, judge: Judge | None, models: Sequence[Candidate]
) -> None:
    """Refuse metrics for which the judge is of the wrong kind, or the samples are too few."""
    for name in metrics:
        if models and plan.num < FEWEST.get(name, 1):
            raise UserError(f"The metric {name} needs {FEWEST[name]} samples: raise --num.")
    if "mauve" in metrics and not isinstance(judge, CausalJudge):
        raise UserError(
            "The metric mauve compares features of a causal language model: give one as --judge."
        )
    if "mauve" in metrics and find_spec("mauve") is None:
        raise MissingExtraError("The metric mauve", "eval")
    if "ar-kl" in metrics and judge is not None and not judge.exact:
        raise UserError(
            f"The metric ar-kl needs a judge that knows the likelihood of tokens, and {judge.name} "
            "does not: use `oracle` or a left-to-right model of didi."
        )
    if models and isinstance(judge, TokenJudge):
        judge.check_tokenizer(models[0].source, models[0].tokenizer_hash)
