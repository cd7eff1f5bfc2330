"""Evaluations during training: held-out likelihood, and quick numbers of a few-step sampler.

A masked model's samples have a path whose probability is known, hence a path KL to the judge's law.
A uniform-state model reaches a text along many paths: there is no path KL. A judge's opinion of
its samples improves when they lose variety, so their entropy belongs beside it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig, Order
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.run import DistillTask, Teacher
from didi_instruct.distillation.watch import unique_ngrams
from didi_instruct.evaluation.diversity import unigram_entropy
from didi_instruct.evaluation.stats import Numbers, mean_and_error
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import Logits, LogitsDenoiser
from didi_instruct.sampling.draw import DrawOptions, Noise
from didi_instruct.sampling.state import Canvas, Samples, State, join
from didi_instruct.sampling.uniform_state import uniform_state
from didi_instruct.seeding import mix
from didi_instruct.training.likelihood import (
    Likelihood,
    LogLikelihood,
    likelihood,
    nelbo_judge,
    perplexity,
)
from didi_instruct.training.loop import Evaluate, Tick
from didi_instruct.training.objectives import Batch, make_objective
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.replica import Replica

ROWS, LAW_ENTRIES = 256, 2**28
"""Samples drawn at a time, at most; and entries of their laws over the vocabulary in a step."""

Facts = Callable[[Tensor], Mapping[str, float]]
"""Facts about samples (N, L), by name."""
Loss = Callable[[Batch], Tensor]
"""Nats per token of each sequence of a batch: (B,)."""


@dataclass(frozen=True, slots=True)
class QuickTest:
    """Settings of the draws and their judge: the same for all models of a run."""

    schedule: Schedule
    start: Tensor
    """(N, L) where the samples start: masks, what is given before them, the ends behind."""
    mask_id: int
    """The id of positions to write: the mask, or V for a uniform-state model."""
    budgets: Sequence[int]
    judge: LogLikelihood | None
    """None: texts that continue a prompt have no judge here."""
    seed: int = 0
    also: Facts | None = None
    """More that can be said of samples, where the truth is known."""
    end_id: int | None = None
    """The id that fills windows behind their texts, where each has its own."""
    start_log_prob: Tensor | None = None
    """(N,) of drawing the starts, which a judge of whole texts counts too: of their lengths."""
    uniform: bool = False
    """True for uniform-state models."""

    @property
    def exact(self) -> bool:
        """True if the judge knows the likelihood, not a bound of it."""
        return self.also is not None

    def draw(
        self,
        logits: Logits,
        steps: int,
        tick: Tick = lambda: None,
        masks: int = 1,
        order: Order = "random",
    ) -> Samples:
        """Samples from a denoiser; `tick` is called between batches.

        `masks` is how many it knows, `order` the one that it reveals positions in.
        """
        denoiser, parts = LogitsDenoiser(logits, self.mask_id), []
        entries = self.start.shape[1] * self.mask_id // (1 if self.uniform else steps)
        size = max(1, min(ROWS, LAW_ENTRIES // max(1, entries)))
        for first in range(0, len(self.start), size):
            tick()
            tokens = self.start[first : first + size]
            indices = torch.arange(first, first + len(tokens), device=tokens.device)
            canvas = Canvas(tokens, self.mask_id, indices, masks=1 if self.uniform else masks)
            state = State(canvas, DrawOptions(seed=self.seed))
            if self.uniform:
                drawn = uniform_state(denoiser, self.schedule, state, steps=steps)
            else:
                drawn = ancestral(denoiser, self.schedule, state, steps=steps, order=order)
            parts.append(drawn)
        return join(parts)

    def measure(
        self,
        logits: Logits,
        tag: str = "",
        tick: Tick = lambda: None,
        masks: int = 1,
        order: Order = "random",
    ) -> dict[str, float]:
        """Numbers of a denoiser at every budget, by name; the arguments are those of `draw`."""
        found: dict[str, float] = {}
        for steps in self.budgets:
            samples = self.draw(logits, steps, tick, masks, order)
            numbers = self._of_texts(samples.tokens) if self.uniform else self._of_paths(samples)
            visible = torch.ones_like(samples.tokens, dtype=torch.bool)
            if self.end_id is not None:
                visible = self.start != self.end_id
            numbers["unique_4gram"] = unique_ngrams(samples.tokens, visible).item()
            if self.also is not None:
                numbers |= self.also(samples.tokens)
            for name, value in numbers.items():
                base = name.removesuffix("_se")
                found[f"{base}_{steps}{tag}{name.removeprefix(base)}"] = value
        return found

    def whole_texts(self, samples: Samples) -> Samples:
        """Samples as a judge of texts sees them: their lengths were drawn too."""
        if self.start_log_prob is None:
            return samples
        assert samples.log_prob is not None
        return replace(samples, log_prob=samples.log_prob + self.start_log_prob)

    def _of_paths(self, samples: Samples) -> dict[str, float]:
        assert samples.log_prob is not None
        numbers = {}
        if self.judge is not None:
            mean, error = mean_and_error(path_gaps(self.whole_texts(samples), self.judge))
            numbers = {"path_kl": mean, "path_kl_se": error}
        written = max(1, int((self.start == self.mask_id).sum()))
        return numbers | {"path_entropy": -samples.log_prob.sum().item() / written}

    def _of_texts(self, tokens: Tensor) -> dict[str, float]:
        numbers = {}
        if self.judge is not None:
            nats = -self.judge(tokens).double().cpu() / tokens.shape[1]
            numbers = {
                "judge_nats": nats.mean().item(),
                "judge_nats_se": nats.std().item() / math.sqrt(len(nats)),
                "judge_ppl": perplexity(nats.mean().item()),
            }
        return numbers | {"entropy": unigram_entropy(tokens.cpu()).mean().item()}


def quick_test(task: DistillTask, valid: TokenSource | None, teacher: Teacher) -> QuickTest:
    """The quick evaluation of a run: exact on the oracle language, else by the teacher's NELBO."""
    d = task.distillation
    config, seed = d.config, mix(d.config.train.seed, "quick")
    indices, prompts = torch.arange(config.watch.samples), None
    judge: LogLikelihood | None = None
    model, oracle = teacher.network.config, _oracle(teacher)
    if config.continues:
        source = valid or d.data
        assert source is not None
        prompts = source.ordered(0, config.watch.samples)
        indices, oracle = indices[: len(prompts)], None
    elif oracle is not None:
        judge = oracle_judge(oracle)
    else:
        judge = nelbo_judge(_loss_of(d.teacher, model), model, device=d.world.device)
    start, which = d.starts(Noise(seed, indices), prompts)
    start, uniform = start[which].to(d.world.device), model.kind == "duo"
    return QuickTest(
        d.schedule,
        start,
        d.mask_id,
        config.watch.budgets,
        judge,
        seed,
        also=None if oracle is None else oracle_facts,
        end_id=None if uniform else d.starts.end_id,
        start_log_prob=None if uniform else d.starts.log_prob(start),
        uniform=uniform,
    )


def evaluation_of_students(
    task: DistillTask, test: QuickTest, valid: TokenSource | None
) -> Evaluate:
    """Quick numbers of the averaged and of the raw student; every process computes the same."""
    d = task.distillation
    model, student = d.model_config, d.student
    how: Any = {"masks": model.masks, "order": model.order}
    loss = _loss_of(student, model)

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with student.averaged():
            found = test.measure(student.log_probs, tick=tick, **how)
            if valid is not None:
                rows = d.config.train.eval_sequences
                held_out = _held_out(loss, model, valid, rows, d.world.device, tick)
                found["valid_nats_per_token"] = held_out.nats_per_token
        if student.ema is not None:
            found |= test.measure(student.log_probs, "_raw", tick=tick, **how)
        return found

    return evaluate


def held_out_likelihood(task: PretrainTask, valid: TokenSource) -> Evaluate:
    """Held-out nats per token of the averaged model, under the same noise each time.

    Every process computes the same.
    """
    rows, device = task.config.train.eval_sequences, task.world.device

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with task.averaged():
            found = _held_out(
                task.losses, task.model_config, valid, rows, device, tick, task.rows_per_pass
            )
        numbers = {"valid_nats_per_token": found.nats_per_token}
        if found.sequences > 1:  # one has no spread
            numbers["valid_ci95"] = (found.ci95[1] - found.ci95[0]) / 2
        return numbers

    return evaluate


def _held_out(
    loss: Loss,
    model: ModelConfig,
    valid: TokenSource,
    rows: int,
    device: torch.device,
    tick: Tick,
    batch_size: int = 64,
) -> Likelihood:
    return likelihood(
        loss,
        model,
        valid.ordered,
        sequences=min(rows, valid.num_sequences or rows),
        batch_size=batch_size,
        device=device,
        progress=lambda _: tick(),
    )


def _loss_of(replica: Replica, config: ModelConfig) -> Loss:
    """A network's part of its pretraining objective."""
    objective = make_objective(config)
    return lambda batch: replica.run(lambda network: objective.loss(network, batch))


def _oracle(teacher: Teacher) -> OracleLanguage | None:
    """The built-in language, if that is what the model speaks: its texts fill their windows."""
    language = OracleLanguage.default()
    if teacher.tokenizer is None or teacher.tokenizer.hash != language.tokenizer.hash:
        return None
    config = teacher.network.config
    found = (config.num_tokens, config.length, config.end_id)
    return language if found == (language.num_tokens, language.length, None) else None


def path_gaps(samples: Samples, judge: LogLikelihood) -> Numbers:
    """Log q(path) - log p(x) of each sample, whose mean is the path KL: (B,).

    An ancestral sampler knows the probability of its own draws. The order in which it reveals
    positions does not depend on the model, and given the order a sequence x has one path, so

        path entropy = -E sum log p(drawn token | state)  =  H(x | order)  <=  H(x)
        path KL      = E[-log p(x)] - path entropy        >=  KL(sampler || judge)

    with equality where the text does not depend on the order. A temperature that sharpens the
    samples lowers both terms: path KL falls only if the samples come closer to the judge's law. It
    is too high where the judge gives a lower bound.
    """
    assert samples.log_prob is not None, "this sampler does not know the probability of its path"
    gaps: Numbers = (samples.log_prob.double().cpu() - judge(samples.tokens).double().cpu()).numpy()
    return gaps


def oracle_judge(language: OracleLanguage) -> LogLikelihood:
    """Exact log-probabilities under the oracle language, wherever the samples are."""
    return lambda tokens: language.log_prob(tokens.to(language.device))


def oracle_facts(tokens: Tensor) -> dict[str, float]:
    """Share of broken sentences, and the variety of what texts are about, against true texts.

    The entropy of the latents is estimated from as many texts of the language itself, so that few
    samples understate both alike.
    """
    language = OracleLanguage.default()
    true = language.sample(len(tokens), torch.Generator().manual_seed(0))
    drawn = tokens.to(language.device)
    return {
        "mistakes": float(language.mistakes(drawn).any),
        "latent_share": language.latent_entropy(drawn) / language.latent_entropy(true),
    }
