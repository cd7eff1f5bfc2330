"""Quick evaluations of a distillation: what is drawn, who judges, what is measured."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.run import Distillation, DistillTask
from didi_instruct.evaluation.quick import QuickTest, oracle_facts, oracle_judge
from didi_instruct.evaluation.quick_uniform import UniformQuickTest
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.sampling.draw import Noise
from didi_instruct.seeding import mix
from didi_instruct.training.likelihood import LogLikelihood, likelihood, nelbo_judge
from didi_instruct.training.loop import Evaluate, Tick
from didi_instruct.training.objectives import Batch, make_objective
from didi_instruct.training.pretrain_task import PretrainTask
from didi_instruct.training.replica import Replica

Facts = Callable[[Tensor], Mapping[str, float]]
"""Facts about samples (N, L), by name."""


def quick_test(task: DistillTask, valid: TokenSource | None, loaded: LoadedModel) -> QuickTest:
    """The quick evaluation: exact on the oracle language, else judged by the teacher's NELBO."""
    d = task.distillation
    config, seed = d.config, mix(d.config.train.seed, "quick")
    indices, prompts = torch.arange(config.watch.samples), None
    judge: LogLikelihood | None = None
    also: Facts | None = None
    if config.continues:
        source = valid or d.data
        assert source is not None
        prompts = source.ordered(0, config.watch.samples)
        indices = indices[: len(prompts)]
    else:
        judge, also = _judge(d, loaded)
    start, which = d.starts(Noise(seed, indices), prompts)
    start, budgets = start[which].to(d.world.device), config.watch.budgets
    how: Any = {"judge": judge, "seed": seed, "also": also, "exact": also is not None}
    if loaded.config.kind == "duo":
        return UniformQuickTest(d.schedule, start, d.mask_id, budgets, **how)
    how |= {"end_id": d.starts.end_id, "start_log_prob": d.starts.log_prob(start)}
    return QuickTest(d.schedule, start, d.mask_id, budgets, **how)


def _judge(d: Distillation, loaded: LoadedModel) -> tuple[LogLikelihood, Facts | None]:
    """The judge of whole texts; and other facts of them, where the truth is known."""
    if (language := _oracle(loaded)) is not None:
        return oracle_judge(language), oracle_facts
    loss = _loss_of(d.teacher, loaded.config)
    return nelbo_judge(loss, loaded.config, device=d.world.device), None


def _loss_of(replica: Replica, config: ModelConfig) -> Callable[[Batch], Tensor]:
    """A network's part of its pretraining objective: nats per token of each sequence."""
    objective = make_objective(config)
    return lambda batch: replica.run(lambda network: objective.loss(network, batch))


def _oracle(loaded: LoadedModel) -> OracleLanguage | None:
    """The built-in language, if that is what the model speaks: its texts fill their windows."""
    language = OracleLanguage.default()
    speaks = loaded.tokenizer is not None and loaded.tokenizer.hash == language.tokenizer.hash
    if loaded.config.end_id is not None:
        return None
    shape = (loaded.config.num_tokens, loaded.config.length)
    return language if speaks and shape == (language.num_tokens, language.length) else None


def evaluator(
    task: DistillTask, test: QuickTest, valid: TokenSource | None, result: dict[str, float]
) -> Evaluate:
    """Quick evaluation of the averaged and of the raw student; every process computes the same."""
    d = task.distillation
    train, model, student = d.config.train, d.model_config, d.student
    how: Any = {"masks": model.masks, "order": model.order}
    loss = _loss_of(student, model)

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with d.student.averaged():
            found = test.measure(student.log_probs, tick=tick, **how)
            if valid is not None:
                count = min(train.eval_sequences, valid.num_sequences or train.eval_sequences)
                held_out = likelihood(
                    loss,
                    model,
                    valid.ordered,
                    sequences=count,
                    device=d.world.device,
                    progress=lambda _: tick(),
                )
                found["valid_nats_per_token"] = held_out.nats_per_token
        if d.student.ema is not None:
            found |= test.measure(student.log_probs, "_raw", tick=tick, **how)
        result.clear()
        result.update(found)
        return found

    return evaluate


def held_out_likelihood(task: PretrainTask, valid: TokenSource) -> Evaluate:
    """Held-out nats per token of the averaged model, under the same noise each time.

    Every process computes the same.
    """
    most = task.config.train.eval_sequences
    count = min(most, valid.num_sequences or most)

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with task.averaged():
            result = likelihood(
                task.losses,
                task.model_config,
                valid.ordered,
                sequences=count,
                batch_size=task.rows_per_pass,
                device=task.world.device,
                progress=lambda _: tick(),
            )
        numbers = {"valid_nats_per_token": result.nats_per_token}
        if result.sequences > 1:  # one has no spread
            numbers["valid_ci95"] = (result.ci95[1] - result.ci95[0]) / 2
        return numbers

    return evaluate
