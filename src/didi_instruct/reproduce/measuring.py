"""Functions that jobs call to measure models: rows as `didi eval` makes them, kept by content.

All jobs of a grid share one folder of samples and numbers, so that what two items ask of one model
is drawn and judged once.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from didi_instruct.evaluation.config import EvalConfig
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.evaluate import evaluate
from didi_instruct.evaluation.judges import Judge, JudgeConfig, open_judge
from didi_instruct.evaluation.measuring import plain
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.reproduce.jobs import Context, Job
from didi_instruct.reproduce.minutes import learning
from didi_instruct.reproduce.scale import Scale
from didi_instruct.training.likelihood import perplexity

EVALS = "evals"
"""Folder of samples and of what was measured of them, in that of the grid."""
SHOWN = 2
"""Texts of a row that are shown."""


def quality_job(
    scale: Scale,
    name: str,
    model: Job | str,
    *,
    steps: Sequence[int],
    seed: int = 0,
    metrics: Sequence[str] = (),
    num: int | None = None,
    sampler: str | None = None,
    does: str = "quality",
) -> Job:
    """Ask for rows of a model at this scale; perplexity never goes without entropy."""
    usual = ("ppl", "entropy", "path-kl", "unique-4gram")
    inputs: dict[str, Job | str] = {"model": model, "judge": scale.judge}
    if "mauve" in metrics and scale.data is not None:
        inputs["reference"] = scale.data
    return Job(
        name=name,
        does=does,
        inputs=inputs,
        options={
            "steps": list(steps),
            "metrics": list(metrics or usual),
            "sampler": sampler,
            "options": dict(scale.guidance) if sampler == "rgas" else {},  # of the sampler
            **scale.drawing(seed, num),
        },
    )


def quality(context: Context, **settings: Any) -> list[dict[str, Any]]:
    """Rows of one model, one for each number of steps."""
    rows, _ = _evaluate(context, **settings)
    return rows


def texts(context: Context, **settings: Any) -> list[dict[str, Any]]:
    """The same rows with the first texts of each, and what those alone measure."""
    rows, sets = _evaluate(context, **settings)
    judge = judge_of(context, settings["judging"])
    return [row | {"texts": _first(s, judge)} for row, s in zip(rows, sets, strict=True)]


def _first(samples: SampleSet, judge: Judge) -> list[dict[str, Any]]:
    some = samples.first(SHOWN)
    scores = judge.score(some)
    nats = (scores.nats / scores.tokens).tolist()
    entropies = unigram_entropy(some.tokens, some.lengths).tolist()
    return [
        {"text": text, "ppl": plain(perplexity(mean)), "entropy": entropy}
        for text, mean, entropy in zip(some.texts, nats, entropies, strict=True)
    ]


def _evaluate(
    context: Context,
    *,
    steps: Sequence[int],
    num: int,
    seed: int,
    metrics: Sequence[str],
    sampler: str | None,
    options: Mapping[str, Any],
    until_eot: bool,
    batch_size: int,
    judging: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], tuple[SampleSet, ...]]:
    config = EvalConfig(
        metrics=tuple(metrics),
        steps=tuple(steps),
        num=num,
        sampler=sampler,
        options=options,
        seed=seed,
        batch_size=batch_size,
        until_eot=until_eot,
        reference=context.inputs.get("reference"),
        device=context.device,
    )
    found = evaluate(
        [context.inputs["model"]],
        config,
        out=context.shared / EVALS,
        judge=judge_of(context, judging),
        progress=lambda stage, done, total: context.tell(f"{_short(stage)} {done} of {total}"),
    )
    # Where a model lay on this machine says nothing to a reader.
    whose = {"model": None, "judge": found.judge and Path(found.judge).name}
    rows = [row | whose | learning(Path(context.inputs["model"])) for row in found.rows]
    return rows, found.samples


def judge_of(context: Context, judging: Mapping[str, Any]) -> Judge:
    """The judge of a job, opened once for all jobs of this process; `judging` is how it reads."""
    return _open(context.inputs["judge"], context.device, tuple(sorted(judging.items())))


@lru_cache(maxsize=1)
def _open(source: str, device: str | None, judging: tuple[tuple[str, Any], ...]) -> Judge:
    return open_judge(source, JudgeConfig(**dict(judging)), device=device)


def _short(stage: str) -> str:
    return stage.split()[0].lower()
