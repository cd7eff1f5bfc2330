"""Evaluation of samples: draw, measure, compare; every part is kept in a folder and done once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.evaluation.cache import content_key, model_key
from didi_instruct.evaluation.checks import (
    check_comparable,
    check_judge,
    check_models,
    check_reference,
    check_requirements,
)
from didi_instruct.evaluation.compare import compare
from didi_instruct.evaluation.config import EvalConfig, Variant, baseline_config
from didi_instruct.evaluation.drawing import draw_samples
from didi_instruct.evaluation.judges import open_judge
from didi_instruct.evaluation.lengths import joined
from didi_instruct.evaluation.measuring import (
    Context,
    Evaluation,
    Folding,
    Measured,
    Progress,
    Reference,
    Row,
    Start,
    complete,
)
from didi_instruct.evaluation.metrics import METRICS, measure_row
from didi_instruct.evaluation.reference import (
    Wanted,
    open_reference,
    read_chain_set,
    shuffled_set,
)
from didi_instruct.evaluation.samples import OF_TEXT, REAL, SampleSet, read_samples
from didi_instruct.evaluation.scores import Judge
from didi_instruct.hub.sources import (
    LoadOptions,
    ModelInfo,
    find_source,
    peek_models,
    shared_ids,
    shared_tokenizer,
)
from didi_instruct.model import load
from didi_instruct.models.ar import ARModel
from didi_instruct.proteins.chains import Chains, is_fasta, read_chains
from didi_instruct.proteins.folding import FoldSettings, Predictor
from didi_instruct.training.distributed import pick_device

__all__ = ["EvalConfig", "Evaluation", "Variant", "evaluate"]

OF_A_SAMPLER = (
    "fingerprint", "options", "steps", "nfe", "passes", "disc_calls", "temperature", "top_p",
    "batch_size", "device",
)  # fmt: skip
"""Entries that rows of unsampled text do not have."""


def evaluate(
    models: str | Path | Sequence[str | Path | Variant],
    config: EvalConfig | None = None,
    *,
    out: str | Path,
    judge: str | Path | Judge | None = None,
    baseline: str | Path | None = None,
    samples: Sequence[str | Path] = (),
    folding: str | Path | Folding | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Draw samples of models, measure them, and compare them with those of a baseline.

    `models` are SOURCEs, or FASTA files, which are measured as they are; `samples` are files of
    saved samples; `judge` and `folding` are SOURCEs, or open already. All that can be refused is
    refused before the first sample is drawn. Samples and numbers are kept in the folder `out`: what
    is there is neither drawn nor measured again. With several lengths there is an evaluation of
    each, joined row by row, with the means.
    """
    config, out = config or EvalConfig(), Path(out)
    named = [models] if isinstance(models, str | Path) else models
    rows = [row if isinstance(row, Variant) else Variant(str(row), config) for row in named]
    if not rows and not samples:
        raise UserError("Nothing to evaluate: name a model, or saved samples with --samples FILE.")
    if samples and len(config.lengths) > 1:
        raise UserError("Saved samples have the length that they have: leave out --lengths.")
    for own in [config, *(row.config for row in rows if row.config is not config)]:
        check_requirements(own, judge=judge is not None, folding=folding is not None)
    judge = str(judge) if isinstance(judge, Path) else judge
    folding = str(folding) if isinstance(folding, Path) else folding
    baseline = None if baseline is None else str(baseline)
    inputs = _open_inputs(rows, config, judge, baseline, samples, folding, out)
    tables = [_open_table(length, rows, config, inputs) for length in config.lengths or (None,)]
    _draw(tables, inputs, progress)
    found = [_measure(table, inputs, _at_length(progress, table, tables)) for table in tables]
    return found[0] if len(found) == 1 else joined(found, config.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Models and files that all lengths of an evaluation share, each opened once."""

    out: Path
    name: str
    """Names of what is evaluated, in the order given."""
    models: list[ModelInfo]
    tokenizer: Tokenizer | None
    baseline: str | None
    files: list[Path]
    saved: list[SampleSet]
    judge: Judge | None
    folding: Folding | None
    start: Start | None


@dataclass(slots=True, kw_only=True)
class _Table:
    """Samples of one length."""

    config: EvalConfig
    variants: list[Variant]
    chains: list[SampleSet]
    """Of FASTA files."""
    wanted: Wanted | None = None
    """The samples that the reference was read for."""
    text: SampleSet | None = None
    """The reference."""
    drawn: list[list[SampleSet]]
    """Of each variant."""
    rivals: list[SampleSet] = field(default_factory=list)
    """Samples of the baseline."""

    def open_reference(self, wanted: Wanted) -> None:
        """Read the reference, if there is one that was not read for just these samples."""
        if self.config.reference is None or wanted == self.wanted:
            return
        self.wanted = wanted
        self.text = open_reference(self.config.reference, wanted, self.config.reading)
        check_reference(self.config, self.text, wanted)


def _open_inputs(
    rows: Sequence[Variant],
    config: EvalConfig,
    judge: str | Judge | None,
    baseline: str | None,
    samples: Sequence[str | Path],
    folding: str | Folding | None,
    out: Path,
) -> _Inputs:
    chains = [row.source for row in rows if is_fasta(row.source)]
    sources = [*config.beside, *(row.source for row in rows if row.source not in chains)]
    models = peek_models([*sources, *([baseline] if baseline else [])], config.tokenizer)
    tokenizer = shared_tokenizer(models)
    if not models and config.tokenizer is not None:
        tokenizer = Tokenizer.load(config.tokenizer)
    for length in config.lengths or (config.length,):
        check_models(models, [row for row in rows if row.source in sources], config, length)
    files = [Path(path) for path in samples]
    saved = [read_samples(path) for path in files]
    if saved:
        check_comparable(saved, config.metrics, config.num_samples if models else None)
    if isinstance(judge, str):
        judge = open_judge(judge, config.judging, device=config.device)
    check_judge(config, judge, models)
    if chains and tokenizer is None and judge is not None and not judge.reads_texts:
        raise UserError(
            f"{chains[0]} is text, and the judge {judge.name} reads tokens: add --tokenizer "
            f"{judge.name}."
        )
    if isinstance(folding, str):
        folding = open_predictor(folding, out / "folds", config.device)
    start = None
    if config.start is not None:
        known = [*(m.tokenizer_hash for m in models), *(s.origin.tokenizer for s in saved)]
        known += [tokenizer.hash] if tokenizer is not None else [None]  # of FASTA files alone
        start = _open_start(config.start, known[0])
    return _Inputs(
        out=out,
        name=", ".join([row.source for row in rows] or map(str, files)),
        models=models,
        tokenizer=tokenizer,
        baseline=baseline,
        files=files,
        saved=saved,
        judge=judge,
        folding=folding,
        start=start,
    )


def _open_start(source: str, tokenizer: str | None) -> Start:
    """Load a left-to-right model to start from, if its tokens are those of the samples."""
    found = find_source(source)
    loaded = found.load(LoadOptions())
    if not isinstance(loaded.model, ARModel):
        raise UserError(f"{source} is no left-to-right model of didi: train one (stories-ar).")
    own = loaded.tokenizer.hash if loaded.tokenizer else None
    if own != tokenizer:
        raise UserError(f"{source} and the samples have different tokenizers: train one on theirs.")
    return Start(loaded.model, model_key(found))


def open_predictor(source: str, cache: Path, device: str | None = None) -> Predictor:
    """A folding model that keeps its folds in a folder; on a GPU its language model is bfloat16."""
    chosen = pick_device(device)
    settings = FoldSettings(
        source=source, cache=cache, device=str(chosen), bf16=chosen.type == "cuda"
    )
    return Predictor(settings)


def _open_table(
    length: int | None, rows: Sequence[Variant], config: EvalConfig, inputs: _Inputs
) -> _Table:
    """Read the files of a length, before anything is drawn."""
    length = config.length if length is None else length
    config = replace(config, length=length, lengths=())
    files = [row.source for row in rows if is_fasta(row.source)]
    variants = [
        Variant(row.source, replace(row.config, length=length, lengths=()))
        for row in rows
        if row.source not in files
    ]
    table = _Table(
        config=config,
        variants=variants,
        chains=[read_chain_set(path, inputs.tokenizer, length) for path in files],
        drawn=[[] for _ in variants],
    )
    known = inputs.saved or ([] if inputs.models else table.chains)
    if known:
        table.open_reference(_wanted_of_samples(known, inputs))
    else:
        table.open_reference(_wanted_of_models(config, inputs))
    return table


def _wanted_of_models(config: EvalConfig, inputs: _Inputs) -> Wanted:
    """Requirements of a reference for samples that models will draw."""
    model, ends = inputs.models[-1], any(model.ends for model in inputs.models)
    window = config.length or model.config.length
    fills = model.ends and model.config.kind == "mdlm"  # a text of this length, then its end
    return Wanted(
        num=config.num_samples,
        length=model.config.length if fills else window,
        until_eot=config.until_eot or ends,
        tokenizer_hash=model.tokenizer_hash,
        tokenizer=inputs.tokenizer,
        num_tokens=shared_ids(inputs.models),
        documents=ends,
        residues=config.length if ends else window,
    )


def _wanted_of_samples(sets: Sequence[SampleSet], inputs: _Inputs) -> Wanted:
    """Requirements of a reference for samples that are there."""
    origin = sets[0].origin
    own_window = any(s.origin.own_window for s in sets)
    lengths = {int(number) for s in sets for number in s.lengths}
    return Wanted(
        num=len(sets[0]),
        length=origin.length,
        until_eot=origin.until_eot,
        tokenizer_hash=origin.tokenizer,
        tokenizer=inputs.tokenizer,
        num_tokens=shared_ids(inputs.models),
        documents=own_window or any(model.ends for model in inputs.models),
        residues=None if own_window or len(lengths) > 1 else lengths.pop(),
    )


def _draw(tables: Sequence[_Table], inputs: _Inputs, progress: Progress | None) -> None:
    """Draw the samples of all tables, loading each model once."""
    config = tables[0].config
    used = {variant.source for variant in tables[0].variants} | {inputs.baseline}
    for info in inputs.models:
        if info.source not in used:
            continue
        model = load(info.found, device=config.device, dtype=config.dtype, tokenizer=info.given)
        for table in tables:
            draw = partial(
                draw_samples,
                info.source,
                model,
                folder=inputs.out,
                until_eot=table.config.until_eot,
                progress=_at_length(progress, table, tables),
            )
            own = [n for n, v in enumerate(table.variants) if v.source == info.source]
            asked = [
                (number, request)
                for number in own
                for request in table.variants[number].config.requests(model.config.kind)
            ]
            if own:
                drawn = draw([request for _, request in asked], stage=f"Drawing {info.source}")
                for (number, _), samples in zip(asked, drawn, strict=True):
                    table.drawn[number].append(samples)
            if info.source == inputs.baseline:
                plain = baseline_config(table.config, model)
                stage = f"Drawing {info.source}, the baseline"
                table.rivals = draw(list(plain.requests(model.config.kind)), stage=stage)


def _measure(table: _Table, inputs: _Inputs, progress: Progress | None) -> Evaluation:
    """Measure the samples of one length, and compare them."""
    drawn = [
        (samples, variant.config.metrics)
        for variant, own in zip(table.variants, table.drawn, strict=True)
        for samples in own
    ]
    metrics = table.config.metrics
    sets = [*inputs.saved, *(samples for samples, _ in drawn), *table.chains]
    check_comparable([*sets, *table.rivals], metrics)
    table.open_reference(_wanted_of_samples(sets, inputs))
    context = _context(table, sets, inputs)
    others = []
    if table.text is not None and table.config.measure_reference:
        shuffle = context.chains is not None
        others = _controls(table.text, len(sets[0]), metrics, shuffle=shuffle)
    wanted: list[_Wanted] = [
        *((s, metrics) for s in inputs.saved),
        *drawn,
        *((s, metrics) for s in (*table.chains, *table.rivals)),
        *others,
    ]
    found = list(_measure_rows(wanted, context, inputs.out, progress))
    ours, rest = found[: len(sets)], found[len(sets) :]
    for measured, path in zip(ours, inputs.files, strict=False):  # saved ones come first
        measured.row["file"] = str(path)
    theirs, beside = rest[: len(table.rivals)], rest[len(table.rivals) :]
    compared = [measured.row for measured in ours]
    if theirs:
        compared = compare(ours, theirs, table.config.most_steps, context.seed)
    controls = [
        _of_text(measured.row, text, len(sets[0]), metrics)
        for (text, _), measured in zip(others, beside, strict=True)
    ]
    return Evaluation(
        model=inputs.name,
        rows=[complete(_without_sampler(row)) for row in compared],
        baseline=[complete(measured.row) for measured in theirs],
        judge=None if inputs.judge is None else inputs.judge.name,
        reference=controls[0] if controls else {},
        controls=() if len(controls) < 2 else (controls[0] | {"model": REAL}, *controls[1:]),
        samples=(*sets, *table.rivals),
        measured=tuple(ours),
    )


def _context(table: _Table, sets: Sequence[SampleSet], inputs: _Inputs) -> Context:
    """Context of all rows, whatever the order in which models are named."""
    text, reference = table.text, table.config.reference
    known = [model.config.num_tokens for model in inputs.models]
    # What was read from a file may have more ids than the models.
    known += [1 + int(s.tokens.max()) for s in (*sets, *([text] if text else []))]
    return Context(
        judge=inputs.judge,
        reference=None
        if text is None
        else Reference(text.origin.model, content_key(text), text.texts, text.tokens, text.lengths),
        num_tokens=max(*known, 1),
        seed=table.config.seed % (1 << 63),
        device=str(pick_device(table.config.device)),
        start=inputs.start,
        chains=None if reference is None else _real_chains(reference, table.config.metrics),
        folding=inputs.folding,
    )


def _real_chains(reference: str, metrics: Sequence[str]) -> Chains | None:
    """All chains of a reference, for metrics that compare with them, and for rows of their own."""
    required = {name for metric in metrics for name in METRICS[metric].requires}
    if "chains" in required or ("residues" in required and is_fasta(reference)):
        return read_chains(reference)
    return None


_Wanted = tuple[SampleSet, Sequence[str]]
"""Samples, and what is measured of them."""


def _measure_rows(
    wanted: Sequence[_Wanted], context: Context, out: Path, progress: Progress | None
) -> Iterator[Measured]:
    """Measure all rows, with one progress for all."""
    total, before = sum(len(samples) for samples, _ in wanted), 0
    stage = f"Measuring {len(wanted)} row{'s' if len(wanted) > 1 else ''}"

    def tell(done: int) -> None:
        if progress is not None:
            progress(stage, before + done, total)

    for samples, metrics in wanted:
        tell(0)
        folder = out / "measured" / content_key(samples)
        yield measure_row(samples, metrics, context, folder=folder, progress=tell)
        before += len(samples)
    tell(0)


def _controls(text: SampleSet, num: int, metrics: Sequence[str], *, shuffle: bool) -> list[_Wanted]:
    """Metrics of the reference: none that compares with it, or with another number of texts.

    With `shuffle`, its chains with their residues shuffled are measured too.
    """
    known = [n for n in metrics if len(text) == num or "count" not in METRICS[n].depends_on]
    if text.origin.sampler == OF_TEXT:
        known = [name for name in known if not METRICS[name].of_samplers]
    own = [
        name
        for name in known
        if METRICS[name].of_reference and "reference" not in METRICS[name].requires
    ]
    return [(text, own), *([(shuffled_set(text), known)] if shuffle else [])]


def _of_text(row: Row, text: SampleSet, num: int, metrics: Sequence[str]) -> Row:
    """A row of the reference; numbers that its count of texts forbids are null, with a note."""
    row = _without_sampler(row)
    for metric in (METRICS[name] for name in metrics if len(text) != num):
        if "count" in metric.depends_on and "reference" not in metric.requires:
            for name in metric.fields:
                note = f"depends on the number of texts: {len(text)} here, {num} samples"
                row |= {name: None, f"{name}_ci95": None, f"{name}_note": note}
    return complete(row)


def _without_sampler(row: Row) -> Row:
    """The row, with null for the entries that unsampled text cannot have."""
    if row["sampler"] != OF_TEXT:
        return row
    return row | {**dict.fromkeys(OF_A_SAMPLER), "seed": row["bootstrap_seed"]}


def _at_length(
    progress: Progress | None, table: _Table, tables: Sequence[_Table]
) -> Progress | None:
    """A progress that names the length, where there are several."""
    if progress is None or len(tables) == 1:
        return progress
    tell = progress
    return lambda stage, done, total: tell(f"{stage}, length {table.config.length}", done, total)
