"""Estimate the cost of a job in FLOPs: parameters times tokens, times the passes of its method.

It serves planning, not comparison: attention is counted, data loading is not, and the share of a
GPU's peak that is reached is assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import PretrainConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import is_ours, read_manifest
from didi_instruct.models.dit import count_parameters
from didi_instruct.models.foreign.reading import recognise
from didi_instruct.reproduce.add_tokenizer import ADOPT, here
from didi_instruct.reproduce.baseline_rows import WAYS, budgets_of, sweep_of
from didi_instruct.reproduce.jobs import NO_MODELS, Job
from didi_instruct.reproduce.measure import WHOLE
from didi_instruct.reproduce.methods import DISTILLATIONS

PEAK = 989e12
"""FLOPs a second of an H100 or H200 in bfloat16, without sparsity."""
TRAINING_MFU, SAMPLING_MFU = 0.30, 0.15
"""Shares of the peak that are assumed."""
FORWARD, LEARN = 1, 3
"""Passes: a backward counts as two."""
GPT2_LARGE = 774e6
CORPORA, DRAWS = 7, 8
"""Of a zero-shot table."""
CHEAP = ("speeds", "task", "adaptation")
"""Tasks that take a few batches, or one pass over a task's texts, of each model."""


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of a job; None where the size of a model is not known before it is there."""

    training: float | None = 0.0
    sampling: float | None = 0.0

    def shared(self, parts: int) -> "Cost":
        """Cost of one of several equal parts."""
        known = (self.training, self.sampling)
        return Cost(*(None if flops is None else flops / parts for flops in known))

    @property
    def gpu_hours(self) -> float | None:
        """On one H100 or H200, at the assumed shares of its peak."""
        if self.training is None or self.sampling is None:
            return None
        seconds = self.training / (PEAK * TRAINING_MFU) + self.sampling / (PEAK * SAMPLING_MFU)
        return seconds / 3600


@lru_cache(maxsize=64)
def forward_flops(model: ModelConfig) -> float:
    """FLOPs of one text: two for each parameter and token, and attention of all tokens to all."""
    length = model.length
    attention = 4 * model.layers * length * length * model.hidden
    return 2.0 * count_parameters(model) * length + attention


def cost_of(job: Job, *, draws_bank: bool = True) -> Cost:
    """Cost of a job; a bank of texts counts for the run that draws it."""
    if job.does == "pretrain":
        config = job.settings()
        model = _resolve(job)
        texts = config.train.steps * config.train.batch_size
        return Cost(training=texts * LEARN * forward_flops(model))
    if job.does == "distill":
        return _distillation(job, draws_bank)
    if job.does == "finetune":
        tuned, train = model_of(job), job.settings().train
        texts = train.steps * train.batch_size
        return Cost(training=None if tuned is None else texts * LEARN * forward_flops(tuned))
    if job.before or job.does == ADOPT:  # others draw and measure for it; nothing is computed
        return Cost()
    return _measuring(job).shared(job.options.get("part", WHOLE)[1])


def _distillation(job: Job, draws_bank: bool) -> Cost:
    model = model_of(job.inputs["teacher"])
    if model is None:
        return Cost(None, None)
    config, once = job.settings(), forward_flops(model)
    texts = config.iterations * config.train.batch_size
    passes = DISTILLATIONS[config.method].passes + (config.didi.rollout_steps - 1) * FORWARD
    reference, banked = config.reference, config.reads_bank
    if config.method == "didi" and reference.source == "online":
        passes += (reference.steps - 1) * FORWARD  # the first step has one row for all texts
    bank = reference.rows * reference.steps * once if banked and draws_bank else 0.0
    return Cost(training=texts * passes * once, sampling=bank)


def _measuring(job: Job) -> Cost:
    """Samples in all settings, each read once by a judge; likelihood where there is no judge."""
    options = job.options
    models = {r: model_of(g) for r, g in job.inputs.items() if r not in NO_MODELS}
    if not models:  # what a function trains or writes itself is small
        return Cost()
    known = {role: model for role, model in models.items() if model is not None}
    if len(known) < len(models):
        return Cost(None, None)
    if job.does in CHEAP:
        return Cost()
    if job.does == "cells":  # folding, which costs more, is not in it
        (model,) = known.values()
        chains = options["num"] * sum(options["steps"])
        parts = [
            replace(model, length=length, end_id=None, lengths=()) for length in options["lengths"]
        ]
        return Cost(sampling=sum(chains * forward_flops(part) for part in parts))
    if job.does == "zero_shot":
        texts = CORPORA * options["sequences"] * DRAWS
        return Cost(sampling=sum(texts * forward_flops(model) for model in known.values()))
    total = 0.0
    for role, model in known.items():
        passes, rows = _drawn(role, model, job)
        total += passes * forward_flops(model) + rows * _reading(job.inputs["judge"], model.length)
    return Cost(sampling=options["num"] * total)


def _drawn(role: str, model: ModelConfig, job: Job) -> tuple[float, int]:
    """Passes of one sample in all settings of a model, and how many settings there are."""
    options = job.options
    steps = options["steps"]
    budgets = [steps[role]] if isinstance(steps, Mapping) else list(steps)
    if job.does == "way":
        return _swept(role, model, budgets, options)
    settings = 1.0
    if job.does in ("landscape", "anova"):
        candidates = options["candidates"]
        settings = options.get("points") or len(options["scales"]) * len(candidates)
        settings *= _guided(sum(candidates) / len(candidates))
    elif options.get("sampler") == "rgas" or options.get("samplers", {}).get(role) == "rgas":
        settings = _guided(4)
    # A cache of keys and values makes one pass of the tokens one by one.
    passes = len(budgets) if model.kind == "ar" else sum(budgets)
    return settings * passes, len(budgets) * max(1, round(settings))


def _swept(
    role: str, model: ModelConfig, budgets: Sequence[int], options: Mapping[str, Any]
) -> tuple[float, int]:
    """Cost where a model is sampled over a sweep of temperature and top-p."""
    passes, rows = 0.0, 0
    more = {name: options[name] for name in ("most_steps", "few", "costly")}
    own = 1 if model.kind == "ar" else model.length
    for way in (way for way in WAYS if (way.role, way.method) == (role, options["method"])):
        steps = [own if nfe is None else nfe for nfe in budgets_of(way, budgets, **more)]
        sweep = len(sweep_of(way, options["temperatures"], options["top_ps"]))
        passes += sweep * sum(steps) * (_guided(4) if way.sampler == "rgas" else 1)
        rows += sweep * len(steps)
    return passes, rows


def _guided(candidates: float) -> float:
    """Passes of a step of RGAS: half of them tilt, half score candidates."""
    return (FORWARD + LEARN + FORWARD + candidates) / 2


def _reading(judge: Job | str, length: int) -> float:
    if judge == "oracle":
        return 0.0
    model = model_of(judge)
    return forward_flops(model) if model else 2.0 * GPT2_LARGE * length


def model_of(given: Job | str) -> ModelConfig | None:
    """The shape of a model that is or will be there."""
    if isinstance(given, Job):
        if given.does == "pretrain":
            return _resolve(given)
        parent = {"distill": "teacher", "finetune": "model", ADOPT: "model"}.get(given.does)
        return model_of(given.inputs[parent]) if parent else None
    path = here(given) if given else None
    return None if path is None else _shape(path)


@lru_cache(maxsize=64)
def _shape(path: Path) -> ModelConfig | None:
    """By its settings, or by the headers of its weights; None of what is not of the family."""
    if is_ours(path):
        return read_manifest(path).model
    try:
        return recognise(path).config
    except UserError:
        return None


def _resolve(job: Job) -> ModelConfig:
    config = job.settings()
    assert isinstance(config, PretrainConfig)
    return config.model.resolve(_vocabulary(config))


def _vocabulary(config: PretrainConfig) -> int:
    """Ids of the tokenizer, as far as its name tells."""
    if config.data.source == "oracle":
        return OracleLanguage.default().num_tokens
    if config.data.tokenizer.endswith(".json") and Path(config.data.tokenizer).is_file():
        return Tokenizer.load(Path(config.data.tokenizer)).size
    name, _, size = config.data.tokenizer.partition(":")
    return int(size) if name == "bpe" and size.isdigit() else 50257
