"""Sample quality: draw, keep, judge, compare; every part is kept in a folder and done once."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from didi_instruct.api.evaluate import held_out
from didi_instruct.api.generation import Request
from didi_instruct.api.model import Model, load
from didi_instruct.api.samplers import find_sampler
from didi_instruct.config.parse import nearest
from didi_instruct.data.files import write_atomic
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import UserError
from didi_instruct.evaluation.frontier import Point, equal_nfe, equal_passes, sweep, vsf
from didi_instruct.evaluation.judges import Judge
from didi_instruct.evaluation.likelihood import check_data
from didi_instruct.evaluation.paths import gap_closed
from didi_instruct.evaluation.rows import (
    METRICS,
    Measuring,
    Progress,
    Reference,
    Row,
    Yardstick,
    check_comparable,
    describe,
)
from didi_instruct.evaluation.samples import (
    Origin,
    SampleSet,
    read_samples,
    text_lengths,
    write_samples,
)
from didi_instruct.models.manifest import MODEL, read_manifest
from didi_instruct.training.world import pick_device

NEED_A_PATH = ("path-kl", "ar-kl")
"""Measures of samplers, not of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to draw from each model."""

    steps: tuple[int, ...]
    most_steps: int | None = None
    """Steps of the baseline at its best, which the gap is measured to; None: no gap."""
    num: int = 256
    length: int | None = None
    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_p: float = 1.0
    temperatures: tuple[float, ...] = ()
    """Of the sweep; empty without one."""
    top_ps: tuple[float, ...] = ()
    seed: int = 0
    batch_size: int = 64
    until_eot: bool = False

    def requests(self) -> Iterator[Request]:
        """One wish per row of the table."""
        settings = [(self.temperature, self.top_p)]
        if self.temperatures or self.top_ps:
            settings = [*sweep(self.temperatures, self.top_ps)]
        for steps in self.steps:
            for temperature, top_p in settings:
                yield Request(
                    num=self.num,
                    steps=steps,
                    length=self.length,
                    sampler=self.sampler,
                    options=self.options,
                    temperature=temperature,
                    top_p=top_p,
                    seed=self.seed,
                    batch_size=self.batch_size,
                )


def check_metrics(metrics: Sequence[str], judge: bool, reference: bool) -> None:
    """Refuse measures that are not known, or that lack what they need."""
    if not metrics:
        raise UserError(f"No metric is named. Known: {', '.join(METRICS)}.")
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"`{name}` is not a metric.{nearest(name, list(METRICS))}")
        if METRICS[name].judge and not judge:
            raise UserError(f"The metric {name} needs a judge: add --judge SOURCE.")
        if METRICS[name].reference and not reference:
            raise UserError(f"The metric {name} compares with text: add --reference DATA.")
    if "ppl" in metrics and "entropy" not in metrics:
        raise UserError("Perplexity alone proves nothing: add the metric entropy.")


class Studio:
    """A folder of samples and of what was measured of them; nothing in it is done twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(
        self, source: str, model: Model, plan: Plan, progress: Progress | None = None
    ) -> list[SampleSet]:
        """Samples of a model for every row, drawn now where they are missing."""
        fingerprint = read_manifest(Path(source)).files[MODEL].sha256
        wishes = list(plan.requests())
        found = []
        for number, wish in enumerate(wishes):
            if progress is not None:
                progress("Drawing", number, len(wishes))
            key = _key(fingerprint, _plain(wish), plan.until_eot)
            path = self.folder / "samples" / f"{key}.jsonl"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_samples(path, _draw(source, fingerprint, model, wish, plan.until_eot))
            kept = read_samples(path)
            found.append(replace(kept, origin=replace(kept.origin, model=source)))
        if progress is not None:
            progress("Drawing", len(wishes), len(wishes))
        return found

    def measure(
        self,
        samples: SampleSet,
        metrics: Sequence[str],
        yardstick: Yardstick,
        progress: Progress | None = None,
    ) -> Row:
        """One row; a measure that was taken before is read."""
        path = self.folder / "measured" / f"{_key(asdict(samples.origin), len(samples))}.json"
        known: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
        measuring = Measuring(samples, yardstick, progress)
        row = describe(samples)
        for name in metrics:
            key = _key(name, _means(name, yardstick))
            if key not in known:
                known[key] = METRICS[name].compute(measuring)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, json.dumps(known).encode())
            row |= known[key]
        return row


def _draw(source: str, fingerprint: str, model: Model, wish: Request, until_eot: bool) -> SampleSet:
    started = time.perf_counter()
    drawn = model.request(wish).samples
    seconds = time.perf_counter() - started
    tokens = drawn.tokens.cpu()
    eot = model.tokenizer.eot_id if model.tokenizer else None
    origin = Origin(
        model=source,
        fingerprint=fingerprint,
        tokenizer=model.tokenizer.hash if model.tokenizer else None,
        sampler=find_sampler(wish.sampler, model.config.kind).name,
        steps=wish.steps or drawn.nfe,
        nfe=drawn.nfe,
        passes=drawn.passes,
        disc_calls=drawn.disc_calls,
        temperature=wish.temperature,
        top_p=wish.top_p,
        seed=wish.seed,
        length=tokens.shape[1],
        until_eot=until_eot,
        seconds=seconds,
    )
    log_prob = None if drawn.log_prob is None else drawn.log_prob.cpu()
    texts = tuple(model.texts(drawn.tokens)) if model.tokenizer else ("",) * len(tokens)
    return SampleSet(origin, tokens, texts, log_prob, text_lengths(tokens, eot, until_eot))


def compare(
    rows: Sequence[Row], baseline: Sequence[Row], most_steps: int | None = None
) -> list[Row]:
    """Rows with their place on the baseline's frontier and the share of the gap they close.

    `vsf` is at equal steps, `vsf_passes` at equal forward passes; where there is nothing to compare
    with, they are null and `…_note` says why.
    """
    points = [_point(row) for row in baseline if "ppl" in row and "entropy" in row]
    found = []
    for row in rows:
        row = dict(row)
        if points and "ppl" in row and "entropy" in row:
            place = _point(row)
            for name, rivals in (
                ("vsf", equal_nfe(points, place.nfe)),
                ("vsf_passes", equal_passes(points, place.passes)),
            ):
                result = vsf(place, rivals)
                row[name] = result.value
                if result.reason:
                    row[f"{name}_note"] = result.reason
        if row.get("path_kl") is not None and most_steps is not None:
            row["gap_closed"] = _gap_closed(row, baseline, most_steps)
        found.append(row)
    return found


def _point(row: Row) -> Point:
    names = ("ppl", "entropy", "nfe", "passes", "temperature", "top_p")
    return Point(*(row[name] for name in names))


def _gap_closed(row: Row, baseline: Sequence[Row], most_steps: int) -> float | None:
    """Share of what few steps cost the baseline; it at its best setting, few steps and most."""
    known = [(b["steps"], b["path_kl"]) for b in baseline if b.get("path_kl") is not None]
    few = [value for steps, value in known if steps == row["steps"]]
    many = [value for steps, value in known if steps == most_steps]
    if not few or not many or min(few) <= min(many):
        return None
    return gap_closed(min(few), row["path_kl"], min(many))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """What `didi eval` found."""

    rows: list[Row]
    baseline: list[Row]
    """Of the model that the rows are compared with."""
    judge: str | None
    reference: Row
    """The same measures of the reference text; empty without one."""


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
    device: str | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Draw from models (or read saved samples), measure, and compare with a baseline."""
    check_metrics(metrics, judge is not None, reference is not None)
    if not sources and not samples:
        raise UserError("Nothing to evaluate: name a model, or saved samples with --samples FILE.")
    studio, sets, rivals = Studio(out), [read_samples(path) for path in samples], []
    model: Model | None = None
    for source in dict.fromkeys([*sources, *([against] if against else [])]):
        model = load(source, device=device)
        if source in sources:
            sets += studio.draw(source, model, plan, progress)
        if source == against:
            budgets = {*plan.steps, *([plan.most_steps] if plan.most_steps else [])}
            wide = replace(plan, steps=tuple(sorted(budgets)))
            rivals += studio.draw(source, model, wide, progress)
    check_comparable([*sets, *rivals])
    text = None
    if reference is not None:
        if model is None:
            raise UserError("--reference is read with a model's tokenizer: name the model too.")
        text = _reference(reference, model, sets[0], plan, reading or ReadOptions())
    yardstick = Yardstick(
        judge=judge,
        reference=None if text is None else Reference(reference or "", text.texts, text.tokens),
        num_tokens=_vocabulary(model, sets),
        seed=plan.seed,
        device=str(pick_device(device)),
    )
    rows = [studio.measure(s, metrics, yardstick, progress) for s in sets]
    baseline = [studio.measure(s, metrics, yardstick, progress) for s in rivals]
    plain = [name for name in metrics if not METRICS[name].reference and name not in NEED_A_PATH]
    return Quality(
        rows=compare(rows, baseline, plan.most_steps) if baseline else rows,
        baseline=baseline,
        judge=None if judge is None else judge.name,
        reference={} if text is None else studio.measure(text, plain, yardstick, progress),
    )


def _reference(
    data: str, model: Model, like: SampleSet, plan: Plan, reading: ReadOptions
) -> SampleSet:
    """As many real texts as there are samples, in the model's tokens and of the same length."""
    source = held_out(model, data, len(like), reading)
    check_data(model.config, model.tokenizer.hash if model.tokenizer else None, source)
    tokens = source.ordered(0, len(like))[:, : like.origin.length]
    if tokens.shape[1] < like.origin.length:
        raise UserError(
            f"{data} has rows of {tokens.shape[1]} tokens, but the samples have "
            f"{like.origin.length}: draw them with --length {tokens.shape[1]}."
        )
    eot = model.tokenizer.eot_id if model.tokenizer else None
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    origin = replace(like.origin, model=data, fingerprint=digest, sampler="text", seconds=None)
    texts = tuple(model.texts(tokens)) if model.tokenizer else ("",) * len(tokens)
    lengths = text_lengths(tokens, eot, plan.until_eot)
    return SampleSet(origin, tokens, texts, None, lengths)


def _vocabulary(model: Model | None, sets: Sequence[SampleSet]) -> int:
    """Ids that a token may have."""
    if model is not None:
        return model.config.num_tokens
    return 1 + max(int(s.tokens.max()) for s in sets)


def _means(name: str, yardstick: Yardstick) -> list[Any]:
    """What a value depends on beside the samples."""
    metric = METRICS[name]
    judge = yardstick.judge.fingerprint if metric.per_judge and yardstick.judge else None
    reference = yardstick.reference.name if metric.reference and yardstick.reference else None
    return [judge, reference, yardstick.seed]


def _plain(wish: Request) -> dict[str, Any]:
    return {k: v for k, v in asdict(wish).items() if k != "batch_size"}


def _key(*parts: Any) -> str:
    """A short name for what a file holds."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
