"""Mistakes in an evaluation that can be known before anything is drawn."""

from collections.abc import Sequence
from importlib.util import find_spec

from didi_instruct.api.plan import Plan
from didi_instruct.api.reference import FEWEST, Like, is_of_residues, open_reference
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.judges import CausalJudge, Judge
from didi_instruct.evaluation.rows import METRICS, knows_texts
from didi_instruct.evaluation.token_judges import TokenJudge
from didi_instruct.hub.sources import ModelInfo, peek_models, shared_ids, shared_tokenizer
from didi_instruct.proteins.chains import is_fasta, read_chains
from didi_instruct.sampling.registry import find_sampler


def check_models(
    sources: Sequence[str],
    against: str | None,
    plan: Plan,
    reference: str | None,
    reading: ReadOptions,
    metrics: Sequence[str] = (),
    tokenizer: str | None = None,
) -> list[ModelInfo]:
    """Refuse models that are missing, that do not belong into one table or cannot draw the plan.

    A baseline that cannot be sampled as the others is sampled plainly: its sampler is not checked.
    """
    wish = next(plan.requests())
    sources = [source for source in sources if not is_fasta(source)]
    found = peek_models([*sources, *([against] if against else [])], tokenizer)
    _check_proteins(metrics, found, reference)
    for model in found:
        if wish.length is not None and wish.length > model.config.length:
            raise UserError(
                f"--length {wish.length}: {model.source} writes 1 to {model.config.length} tokens."
            )
        if model.source in sources:
            find_sampler(plan.sampler, model.config.kind).parse(plan.options)
    _check_ends(found, plan)
    shortest, longest = (f(found, key=_length, default=None) for f in (min, max))
    if wish.length is None and shortest and longest and _length(shortest) != _length(longest):
        raise UserError(
            f"{shortest.source} writes {_length(shortest)} tokens and {longest.source} "
            f"{_length(longest)}, and entropy grows with length: add --length {_length(shortest)}."
        )
    if found and reference is not None:
        last, ends = found[-1], any(model.ends for model in found)
        like = Like(
            num=wish.num,
            length=_window(last, wish.length),
            until_eot=plan.until_eot or ends,
            hash=last.tokenizer_hash,
            tokenizer=shared_tokenizer(found),
            num_tokens=shared_ids(found),
            documents=ends,
            residues=wish.length if ends else wish.length or _length(last),
        )
        open_reference(reference, like, reading, metrics)
    return found


def _check_proteins(
    metrics: Sequence[str], models: Sequence[ModelInfo], reference: str | None
) -> None:
    """Refuse measures of proteins where the models write words, or their program is not there."""
    for name in metrics:
        metric = METRICS[name]
        if metric.prepare is not None:
            metric.prepare()
        for model in models if metric.residues else ():
            if model.tokenizer is not None and not is_of_residues(model.tokenizer):
                raise UserError(
                    f"The metric {name} measures proteins, and {model.source} writes words: leave "
                    "it out."
                )
        if metric.chains and reference is not None:
            read_chains(reference)


def _check_ends(models: Sequence[ModelInfo], plan: Plan) -> None:
    """Refuse texts beside whole windows: entropy grows with length."""
    ended, whole = ([m for m in models if m.ends == ends] for ends in (True, False))
    if ended and whole and not plan.until_eot:
        raise UserError(
            f"{ended[0].source} writes texts that end and {whole[0].source} whole windows: add "
            "--until-eot."
        )


def _length(model: ModelInfo) -> int:
    return model.config.length


def _window(model: ModelInfo, length: int | None) -> int:
    """Tokens of a row; a masked model whose texts end fills the window after a short one."""
    fills = model.ends and model.config.kind == "mdlm"
    return model.config.length if length is None or fills else length


def check_needs(
    metrics: Sequence[str], plan: Plan, judge: Judge | None, models: Sequence[ModelInfo]
) -> None:
    """Refuse metrics for which the judge is of the wrong kind, or the samples are too few."""
    for name in metrics:
        fewest = max(FEWEST.get(name, 1), METRICS[name].min_samples)
        if models and plan.num < fewest:
            raise UserError(f"The metric {name} needs {fewest} samples: raise --num.")
    if "mauve" in metrics and not isinstance(judge, CausalJudge):
        raise UserError(
            "The metric mauve compares features of a causal language model: give one as --judge."
        )
    if "mauve" in metrics and find_spec("mauve") is None:
        raise MissingExtraError("The metric mauve", "eval")
    if "ar-kl" in metrics and judge is not None and not knows_texts(judge):
        raise UserError(
            f"The metric ar-kl needs a judge that knows the likelihood of texts, and {judge.name} "
            "does not: use `oracle` or a left-to-right model."
        )
    if models and isinstance(judge, TokenJudge):
        judge.check_tokenizer(models[0].source, models[0].tokenizer_hash)
        for model in models:
            judge.check_ends(model.source, model.config.end_id)
    priced = [name for name in ("path-kl", "ar-kl") if name in metrics]
    if priced and isinstance(judge, CausalJudge) and judge.end is None:
        for model in (model for model in models if model.ends):
            raise UserError(
                f"{model.source} writes texts that end, and the judge {judge.name} has no token "
                f"for that, whose price the metric {priced[0]} needs: name one with --judge-end."
            )
