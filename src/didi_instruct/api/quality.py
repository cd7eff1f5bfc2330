"""Sample quality: draw, keep, judge, compare; every part is kept in a folder and done once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from didi_instruct.api.evaluate import held_out
from didi_instruct.api.generation import Request
from didi_instruct.api.model import Model, load
from didi_instruct.api.samplers import SAMPLERS, find_sampler
from didi_instruct.config.parse import nearest
from didi_instruct.data.readers import ReadOptions
from didi_instruct.errors import UserError
from didi_instruct.evaluation.comparison import compare
from didi_instruct.evaluation.frontier import sweep
from didi_instruct.evaluation.judges import Judge
from didi_instruct.evaluation.kept import VERSION, content_key, judge_once, key, measure_once
from didi_instruct.evaluation.likelihood import check_data
from didi_instruct.evaluation.rows import (
    METRICS,
    Measured,
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
from didi_instruct.models.manifest import read_manifest
from didi_instruct.training.world import pick_device

NEED_A_PATH = ("path-kl", "ar-kl")
"""Measures of samplers, not of text."""
OF_A_SAMPLER = ("steps", "nfe", "passes", "disc_calls", "temperature", "top_p")
"""What real text does not have."""


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

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.sweeps and (self.temperature, self.top_p) != (1, 1):
            raise UserError(
                "A sweep tries its own temperatures and top-p: leave out temperature and top_p."
            )

    @property
    def sweeps(self) -> bool:
        """Whether several temperatures or top-p are tried."""
        return bool(self.temperatures or self.top_ps)

    def requests(self, counts_tokens: bool = False) -> Iterator[Request]:
        """One wish per row of the table; samplers that count tokens have no steps to choose."""
        settings = [(self.temperature, self.top_p)]
        if self.sweeps:
            settings = [*sweep(self.temperatures, self.top_ps)]
        for steps in (None,) if counts_tokens else dict.fromkeys(self.steps):
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
    """A folder of samples and of what was measured of them; nothing in it is done twice.

    Every setting and every measure has a file of its own, written whole: what is interrupted loses
    the one at work, and two evaluations may share a folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(
        self, source: str, model: Model, plan: Plan, progress: Progress | None = None
    ) -> list[SampleSet]:
        """Samples of a model for every row, drawn now where they are missing."""
        fingerprint = _fingerprint(source)
        sampler = find_sampler(plan.sampler, model.config.kind)
        wishes = list(plan.requests(sampler.counts_tokens))
        found = []
        for number, wish in enumerate(wishes):
            if progress is not None:
                progress("Drawing", number, len(wishes))
            settings = {k: v for k, v in asdict(wish).items() if k != "batch_size"}
            settings["sampler"] = sampler.name
            name = key(VERSION, fingerprint, settings, plan.until_eot)
            path = self.folder / "samples" / f"{name}.jsonl"
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
    ) -> Measured:
        """One row, and the numbers of each sample; a measure that was taken before is read."""
        folder = self.folder / "measured" / content_key(samples)
        judge = yardstick.judge.fingerprint if yardstick.judge else ""
        measuring = Measuring(
            samples, yardstick, progress, lambda name, make: judge_once(name, judge, make, folder)
        )
        found = Measured(describe(samples, yardstick.seed))
        for name in metrics:
            found |= measure_once(name, measuring, folder)
        return found


def _draw(source: str, fingerprint: str, model: Model, wish: Request, until_eot: bool) -> SampleSet:
    started = time.perf_counter()
    drawn = model.request(wish).samples
    seconds = time.perf_counter() - started
    tokens = drawn.tokens.cpu()
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
    texts, lengths = _texts(model, tokens, until_eot)
    return SampleSet(origin, tokens, texts, log_prob, lengths)


def _texts(model: Model, tokens: Tensor, until_eot: bool) -> tuple[tuple[str, ...], Tensor]:
    """Text of the tokens that count, and how many do: a judge of texts reads what others count."""
    if model.tokenizer is None:
        return ("",) * len(tokens), text_lengths(tokens, None, until_eot)
    lengths = text_lengths(tokens, model.tokenizer.eot_id, until_eot)
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return tuple(model.tokenizer.decode_batch([row[:end] for row, end in rows])), lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """What `didi eval` found."""

    rows: list[Row]
    baseline: list[Row]
    """Of the model that the rows are compared with."""
    judge: str | None
    reference: Row
    """The same measures of the reference text; empty without one."""
    samples: tuple[SampleSet, ...] = ()
    """Those behind the rows, the baseline's last."""


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
            rivals += studio.draw(source, model, _plan_of_baseline(plan, model), progress)
    check_comparable([*sets, *rivals])
    text = None
    if reference is not None:
        if model is None:
            raise UserError("--reference is read with a model's tokenizer: name the model too.")
        text = _reference(reference, model, sets[0], reading or ReadOptions())
    yardstick = Yardstick(
        judge=judge,
        reference=None if text is None else _as_reference(text),
        num_tokens=_vocabulary(model, sets),
        seed=plan.seed % (1 << 63),
        device=str(pick_device(device)),
    )
    rows = [studio.measure(s, metrics, yardstick, progress) for s in sets]
    for row, path in zip(rows, samples, strict=False):  # read ones come first
        row.row["file"] = str(path)
    baseline = [studio.measure(s, metrics, yardstick, progress) for s in rivals]
    real: Row = {}
    if text is not None:
        known = [name for name in metrics if not METRICS[name].reference]
        known = [name for name in known if name not in NEED_A_PATH]
        real = studio.measure(text, known, yardstick, progress).row
        real |= {**dict.fromkeys(OF_A_SAMPLER), "seed": yardstick.seed}
    return Quality(
        rows=compare(rows, baseline, plan.most_steps, yardstick.seed),
        baseline=[row.row for row in baseline],
        judge=None if judge is None else judge.name,
        reference=real,
        samples=(*sets, *rivals),
    )


def _plan_of_baseline(plan: Plan, model: Model) -> Plan:
    """The same, with most steps too; plainly sampled where it cannot be sampled as the others."""
    budgets = {*plan.steps, *([plan.most_steps] if plan.most_steps else [])}
    plan = replace(plan, steps=tuple(sorted(budgets)))
    sampler = None if plan.sampler is None else SAMPLERS.get(plan.sampler)
    if sampler is None:
        return plan
    guided = sampler.name == "rgas" and model.discriminator is None
    if guided or sampler.kind != model.config.kind:
        return replace(plan, sampler=None, options={})
    return plan


def _reference(data: str, model: Model, like: SampleSet, reading: ReadOptions) -> SampleSet:
    """As many real texts as there are samples, in the model's tokens and of the same length."""
    source = held_out(model, data, len(like), reading)
    check_data(model.config, model.tokenizer.hash if model.tokenizer else None, source)
    tokens = source.ordered(0, len(like))[:, : like.origin.length]
    if tokens.shape[1] < like.origin.length:
        raise UserError(
            f"{data} has rows of {tokens.shape[1]} tokens, but the samples have "
            f"{like.origin.length}: draw them with --length {tokens.shape[1]}."
        )
    texts, lengths = _texts(model, tokens, like.origin.until_eot)
    origin = replace(like.origin, model=data, sampler="text", seconds=None)
    return SampleSet(origin, tokens, texts, None, lengths)


def _as_reference(text: SampleSet) -> Reference:
    return Reference(text.origin.model, content_key(text), text.texts, text.tokens, text.lengths)


def _vocabulary(model: Model | None, sets: Sequence[SampleSet]) -> int:
    """Ids that a token may have."""
    if model is not None:
        return model.config.num_tokens
    return 1 + max(int(s.tokens.max()) for s in sets)


def _fingerprint(source: str) -> str:
    """Of all that samples depend on: weights, settings, tokenizer and discriminator."""
    manifest = read_manifest(Path(source))
    files = {name: record.sha256 for name, record in manifest.files.items()}
    other = manifest.discriminator and asdict(manifest.discriminator)
    return key(files, asdict(manifest.model), other)
