"""Mistakes in an evaluation that can be known before anything is drawn."""

from collections.abc import Sequence

from didi_instruct.errors import UserError
from didi_instruct.evaluation.config import EvalConfig, Variant
from didi_instruct.evaluation.metrics import METRICS
from didi_instruct.evaluation.reference import Wanted, is_of_residues
from didi_instruct.evaluation.samples import OF_TEXT, SampleSet
from didi_instruct.evaluation.scores import Judge
from didi_instruct.hub.sources import ModelInfo
from didi_instruct.proteins.chains import read_chains
from didi_instruct.sampling.registry import find_sampler


def check_requirements(config: EvalConfig, *, judge: bool, folding: bool) -> None:
    """Refuse metrics that lack what they require, on this machine too."""
    for name in config.metrics:
        requires = METRICS[name].requires
        if "judge" in requires and not judge:
            raise UserError(f"The metric {name} needs a judge: add --judge SOURCE.")
        if "reference" in requires and config.reference is None:
            raise UserError(f"The metric {name} compares with text: add --reference DATA.")
        if "chains" in requires:
            if config.reference is None:
                raise UserError(f"The metric {name} compares with chains: add --reference FASTA.")
            read_chains(config.reference)
        if "folding" in requires and not folding:
            raise UserError(f"The metric {name} folds chains: add --folding SOURCE.")
        prepare = METRICS[name].prepare
        if prepare is not None:
            prepare()


def check_models(
    models: Sequence[ModelInfo],
    variants: Sequence[Variant],
    config: EvalConfig,
    length: int | None,
) -> None:
    """Refuse models that do not belong in one table, or that cannot draw what is asked for.

    A baseline that cannot be sampled as the others is sampled plainly: its sampler is not checked.
    """
    for name in config.metrics:
        for model in models if "residues" in METRICS[name].requires else ():
            if model.tokenizer is not None and not is_of_residues(model.tokenizer):
                raise UserError(
                    f"The metric {name} measures proteins, and {model.source} writes words: leave "
                    "it out."
                )
    by_source = {model.source: model for model in models}
    for model in models:
        if length is not None and length > model.config.length:
            raise UserError(
                f"--length {length}: {model.source} writes 1 to {model.config.length} tokens."
            )
    for variant in variants:
        kind = by_source[variant.source].config.kind
        find_sampler(variant.config.sampler, kind).parse(variant.config.options)
    ended, whole = ([m for m in models if m.ends == ends] for ends in (True, False))
    if ended and whole and not config.until_eot:
        raise UserError(
            f"{ended[0].source} writes texts that end and {whole[0].source} whole windows: add "
            "--until-eot."
        )
    shortest = min(models, key=lambda model: model.config.length, default=None)
    longest = max(models, key=lambda model: model.config.length, default=None)
    if length is None and shortest and longest:
        few, many = shortest.config.length, longest.config.length
        if few != many:
            raise UserError(
                f"{shortest.source} writes {few} tokens and {longest.source} {many}, and entropy "
                f"grows with length: add --length {few}."
            )


def check_reference(config: EvalConfig, text: SampleSet, wanted: Wanted) -> None:
    """Refuse a reference with fewer texts than a metric needs.

    Fewer samples are not its fault, and refused where samples are.
    """
    for name in config.metrics:
        fewest = METRICS[name].min_reference
        if len(text) < fewest <= wanted.num:
            raise UserError(
                f"{config.reference} has {len(text)} texts of {wanted.residues or wanted.length} "
                f"tokens, and the metric {name} needs {fewest}: give more as --reference, or "
                f"leave out {name}."
            )


def check_judge(config: EvalConfig, judge: Judge | None, models: Sequence[ModelInfo]) -> None:
    """Refuse metrics for which the judge is of the wrong kind, or the samples are too few."""
    for name in config.metrics:
        metric = METRICS[name]
        if models and config.num_samples < metric.min_samples:
            raise UserError(f"The metric {name} needs {metric.min_samples} samples: raise --num.")
        if judge is None:
            continue
        if "causal judge" in metric.requires and not judge.reads_texts:
            raise UserError(
                f"The metric {name} compares features of a causal language model: give one as "
                "--judge."
            )
        if "likelihood" in metric.requires and judge.bound:
            raise UserError(
                f"The metric {name} needs a judge that knows the likelihood of texts, and "
                f"{judge.name} does not: use `oracle` or a left-to-right model."
            )
        ended = next((model for model in models if model.ends), None)
        if metric.of_samplers and judge.ends == "unknown" and ended is not None:
            raise UserError(
                f"{ended.source} writes texts that end, and the judge {judge.name} has no token "
                f"for that, whose price the metric {name} needs: name one with --judge-end."
            )
    for model in models:
        if judge is not None:
            judge.check(model)


def check_comparable(
    sets: Sequence[SampleSet], metrics: Sequence[str] = (), num: int | None = None
) -> None:
    """Refuse samples whose numbers do not belong in one table.

    `num` is the number of samples that will be drawn beside them, if any will.
    """
    if not sets:
        raise UserError("There are no samples to measure.")
    first = sets[0].origin
    for other in (s.origin for s in sets[1:] if s.origin.sampler != OF_TEXT):
        if other.tokenizer != first.tokenizer:
            raise UserError(
                f"{first.model} and {other.model} have different tokenizers: entropy and n-grams "
                "count tokens, so they do not belong in one table. Evaluate them one by one."
            )
        if (other.length, other.until_eot) != (first.length, first.until_eot):
            raise UserError(
                f"Samples of {first.model} have {first.length} tokens and those of {other.model} "
                f"{other.length} (or end differently): entropy grows with length. Draw both alike."
            )
    numbers = sorted({len(s) for s in sets} | ({num} if num is not None else set()))
    counted = [name for name in metrics if "count" in METRICS[name].depends_on]
    if counted and len(numbers) > 1:
        raise UserError(
            f"There are {numbers[0]} samples in one row and {numbers[-1]} in another, on which the "
            f"metric {counted[0]} depends: draw equally many (--num), or leave it out."
        )
