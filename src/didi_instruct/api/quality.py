"""Sample quality: draw, keep, judge, compare; every part is kept in a folder and done once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from didi_instruct.api.chain_sets import read_chain_set, shuffled_set
from didi_instruct.api.plan import Plan, check_metrics
from didi_instruct.api.studio import Studio, sampling_fingerprint
from didi_instruct.api.yardstick import make_yardstick
from didi_instruct.data.readers import ReadOptions
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.compare import compare
from didi_instruct.evaluation.describing import check_comparable, complete
from didi_instruct.evaluation.evaluate import Evaluation
from didi_instruct.evaluation.judges import Judge
from didi_instruct.evaluation.measuring import Begun, Folding, Measured, Progress, Row, Yardstick
from didi_instruct.evaluation.rows import METRICS
from didi_instruct.evaluation.samples import OF_TEXT, REAL, SampleSet, read_samples
from didi_instruct.evaluation.token_judges import TokenJudge
from didi_instruct.hub.sources import ModelInfo, load_source, peek_models, shared_tokenizer
from didi_instruct.model import load
from didi_instruct.models.ar import ARModel
from didi_instruct.proteins.chains import is_fasta

__all__ = ["Plan", "Studio", "check_metrics", "evaluate_quality"]

NEED_A_PATH = ("path-kl", "ar-kl")
"""Measures of samplers, not of text."""
OF_A_SAMPLER = (
    "fingerprint", "options", "steps", "nfe", "passes", "disc_calls", "temperature", "top_p",
    "batch_size", "device",
)  # fmt: skip
"""What real text does not have."""


def evaluate_quality(
    sources: Sequence[str],
    plan: Plan,
    metrics: Sequence[str],
    *,
    out: Path,
    judge: Judge | None = None,
    reference: str | None = None,
    reading: ReadOptions | None = None,
    against: str | None = None,
    samples: Sequence[Path] = (),
    tokenizer: str | None = None,
    ar_start: str | None = None,
    folding: Folding | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Draw from models (or read saved samples), measure, and compare with a baseline.

    A source that is a FASTA file is measured as it is. `reference` is text or a file of samples.
    `tokenizer` is for models that bring none; beside saved samples and FASTA files alone, it reads
    the text of the reference. `ar_start` is a left-to-right model that the metric ar-kl begins
    with. `dtype` as in `load`, for all models.
    """
    check_metrics(metrics, judge is not None, reference is not None, folding is not None)
    if not sources and not samples:
        raise UserError("Nothing to evaluate: name a model, or saved samples with --samples FILE.")
    files = [source for source in sources if is_fasta(source)]
    sources = [source for source in sources if source not in files]
    needs_path = any(METRICS[name].path for name in metrics)
    plan = replace(plan, measure_path=plan.measure_path or needs_path)
    studio, sets = Studio(out), [read_samples(path) for path in samples]
    models = peek_models([*sources, *([against] if against else [])], tokenizer)
    if sets:
        check_comparable(sets, metrics, plan.num if models else None)
    chains = _of_files(files, models, tokenizer, plan.length, judge)
    begun = None
    if ar_start is not None:
        known = [model.tokenizer_hash for model in models]
        known += [s.origin.tokenizer for s in (*sets, *chains)]
        begun = _begun(ar_start, known[0])
    drawn, rivals = _draw(studio, sources, against, models, plan, device, dtype, progress)
    sets += drawn + chains
    check_comparable([*sets, *rivals], metrics)
    yardstick, text = make_yardstick(
        sets,
        models,
        seed=plan.seed,
        judge=judge,
        reference=reference,
        reading=reading,
        metrics=metrics,
        tokenizer=tokenizer,
        ar_start=begun,
        folding=folding,
        device=device,
    )
    beside = _of_reference(text, len(sets[0]), metrics, shuffle=yardstick.chains is not None)
    wanted = [*((s, metrics) for s in (*sets, *rivals)), *beside]
    found = list(_measure(studio, wanted, yardstick, progress))
    rows, baseline = found[: len(sets)], found[len(sets) :][: len(rivals)]
    for row, path in zip(rows, samples, strict=False):  # read ones come first
        row.row["file"] = str(path)
    compared = compare(rows, baseline, plan.most_steps, yardstick.seed)
    told = [
        _unsampled(row.row, s, len(sets[0]), metrics)
        for (s, _), row in zip(beside, found[len(sets) + len(rivals) :], strict=True)
    ]
    return Evaluation(
        rows=[complete(r) for r in map(_without_sampler, compared)],
        baseline=[complete(row.row) for row in baseline],
        judge=None if judge is None else judge.name,
        reference=told[0] if told else {},
        controls=() if len(told) < 2 else (told[0] | {"model": REAL}, *told[1:]),
        samples=(*sets, *rivals),
    )


def _draw(
    studio: Studio,
    sources: Sequence[str],
    against: str | None,
    models: Sequence[ModelInfo],
    plan: Plan,
    device: str | None,
    dtype: str | None,
    progress: Progress | None,
) -> tuple[list[SampleSet], list[SampleSet]]:
    """Samples of the models, and of the baseline."""
    sets: list[SampleSet] = []
    rivals: list[SampleSet] = []
    for candidate in models:
        source = candidate.source
        model = load(source, device=device, dtype=dtype, tokenizer=candidate.given)
        if source in sources:
            sets += studio.draw(source, model, plan, progress)
        if source == against:
            rivals = studio.draw_baseline(source, model, plan, progress)
    return sets, rivals


def _of_files(
    files: Sequence[str],
    models: Sequence[ModelInfo],
    tokenizer: str | None,
    length: int | None,
    judge: Judge | None,
) -> list[SampleSet]:
    """Chains of FASTA files, in the tokens of the models beside them."""
    if not files:
        return []
    speaks = shared_tokenizer(models)
    if speaks is None and tokenizer is not None:
        speaks = Tokenizer.load(tokenizer)
    if speaks is None and isinstance(judge, TokenJudge):
        raise UserError(
            f"{files[0]} is text, and the judge {judge.name} reads tokens: add --tokenizer "
            f"{judge.name}."
        )
    return [read_chain_set(path, speaks, length) for path in files]


def _begun(source: str, tokenizer: str | None) -> Begun:
    """A left-to-right model to begin with, if it speaks the tokens of the samples."""
    loaded = load_source(source)
    if not isinstance(loaded.model, ARModel):
        raise UserError(f"{source} is no left-to-right model of didi: train one (stories-ar).")
    own = loaded.tokenizer.hash if loaded.tokenizer else None
    if own != tokenizer:
        raise UserError(f"{source} and the samples have different tokenizers: train one on theirs.")
    return Begun(loaded.model, sampling_fingerprint(source))


Wanted = tuple[SampleSet, Sequence[str]]
"""Samples, and what is measured of them."""


def _measure(
    studio: Studio, wanted: Sequence[Wanted], yardstick: Yardstick, progress: Progress | None
) -> Iterator[Measured]:
    """Measure all rows, with one progress for all: texts of which everything is known."""
    total, before = sum(len(samples) for samples, _ in wanted), 0
    stage = f"Measuring {len(wanted)} row{'s' if len(wanted) > 1 else ''}"

    def tell(done: int) -> None:
        if progress is not None:
            progress(stage, before + done, total)

    for samples, metrics in wanted:
        tell(0)
        yield studio.measure(samples, metrics, yardstick, tell)
        before += len(samples)
    tell(0)


def _of_reference(
    text: SampleSet | None, num: int, metrics: Sequence[str], *, shuffle: bool
) -> list[Wanted]:
    """What is measured of the reference: nothing that compares with it, or with other numbers.

    With `shuffle`, its chains with their residues shuffled are measured too.
    """
    if text is None:
        return []
    known = [name for name in metrics if len(text) == num or not METRICS[name].counts]
    if text.origin.sampler == OF_TEXT:
        known = [name for name in known if name not in NEED_A_PATH]
    own = [n for n in known if METRICS[n].of_real and not METRICS[n].reference]
    return [(text, own), *([(shuffled_set(text), known)] if shuffle else [])]


def _unsampled(row: Row, text: SampleSet, num: int, metrics: Sequence[str]) -> Row:
    """A row of the reference; what its number forbids is null and has a note."""
    row = _without_sampler(row)
    counted = [n for n in metrics if METRICS[n].counts and not METRICS[n].reference]
    for name in counted if len(text) != num else ():
        for column in [c.field for c in METRICS[name].columns] or [name.replace("-", "_")]:
            note = f"depends on the number of texts: {len(text)} here, {num} samples"
            row |= {column: None, f"{column}_ci95": None, f"{column}_note": note}
    return complete(row)


def _without_sampler(row: Row) -> Row:
    """The row, with null for what text that nobody sampled cannot have."""
    if row["sampler"] != OF_TEXT:
        return row
    return row | {**dict.fromkeys(OF_A_SAMPLER), "seed": row["bootstrap_seed"]}
