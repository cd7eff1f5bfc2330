"""Quick evaluations of a distillation: what is drawn, who judges, what is measured."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.hosting import Host
from didi_instruct.distillation.rollout import Noise
from didi_instruct.distillation.task import DistillTask, StudentTask
from didi_instruct.evaluation.likelihood import likelihood
from didi_instruct.evaluation.paths import Judge, nelbo_judge
from didi_instruct.evaluation.quick import QuickTest, oracle_facts, oracle_judge
from didi_instruct.evaluation.quick_uniform import UniformQuickTest
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.seeding import mix
from didi_instruct.training.loop import Evaluate, Tick
from didi_instruct.training.objectives import Batch, make_objective

Facts = Callable[[Tensor], Mapping[str, float]]
"""What can be said of samples, by name."""


def quick_test(task: StudentTask, valid: TokenSource | None, loaded: LoadedModel) -> QuickTest:
    """The quick evaluation: exact on the oracle language, else judged by the teacher's NELBO."""
    if not isinstance(task, DistillTask):
        return _uniform_test(task, loaded)
    config, seed = task.config, mix(task.config.train.seed, "quick")
    indices, prompts = torch.arange(config.watch.samples), None
    judge: Judge | None = None
    also: Facts | None = None
    if config.prompt:
        source = valid or task.data
        assert source is not None
        prompts = source.ordered(0, config.watch.samples)
        indices = indices[: len(prompts)]
    else:
        judge, also = _judge(task, loaded)
    start, owner = task.starts(Noise(seed, indices), prompts)
    start = start[owner].to(task.world.device)
    return QuickTest(
        task.schedule,
        start,
        task.mask_id,
        config.watch.budgets,
        judge,
        seed,
        also,
        exact=also is not None,
        end_id=task.starts.end_id,
        start_log_prob=task.starts.log_prob(start),
    )


def _uniform_test(task: StudentTask, loaded: LoadedModel) -> QuickTest:
    """The quick evaluation of a model without a mask."""
    watch, marker = task.config.watch, loaded.config.num_tokens
    start = torch.full((watch.samples, task.length), marker, device=task.world.device)
    judge, also = _judge(task, loaded)
    seed = mix(task.config.train.seed, "quick")
    return UniformQuickTest(
        task.schedule, start, marker, watch.budgets, judge, seed, also, exact=also is not None
    )


def _judge(task: StudentTask, loaded: LoadedModel) -> tuple[Judge, Facts | None]:
    """Who judges whole texts; and what else is known of them, where the truth is."""
    if (language := _oracle(loaded)) is not None:
        return oracle_judge(language), oracle_facts
    loss = _loss_of(task.teacher_host, loaded.config)
    return nelbo_judge(loss, loaded.config, device=task.world.device), None


def _loss_of(host: Host, config: ModelConfig) -> Callable[[Batch], Tensor]:
    """A hosted network's part of its pretraining objective: nats per token of each sequence."""
    objective = make_objective(config)
    return lambda batch: host.run(lambda net: {"loss": objective.loss(net, batch)})["loss"]


def _oracle(loaded: LoadedModel) -> OracleLanguage | None:
    """The built-in language, if that is what the model speaks: its texts fill their windows."""
    language = OracleLanguage.default()
    speaks = loaded.tokenizer is not None and loaded.tokenizer.hash == language.tokenizer.hash
    if loaded.config.end_id is not None:
        return None
    shape = (loaded.config.num_tokens, loaded.config.length)
    return language if speaks and shape == (language.num_tokens, language.length) else None


def evaluator(
    task: StudentTask, test: QuickTest, valid: TokenSource | None, result: dict[str, float]
) -> Evaluate:
    """Quick evaluation of the averaged and of the raw student; every process computes the same."""
    train, model = task.config.train, task.model_config
    how: Any = {"masks": model.masks, "order": model.order}
    loss = _loss_of(task.student, task.model_config)

    def evaluate(step: int, tick: Tick) -> Mapping[str, float]:
        with task.averaged():
            found = test.measure(task.student_rows, tick=tick, **how)
            if valid is not None:
                count = min(train.eval_sequences, valid.num_sequences or train.eval_sequences)
                held_out = likelihood(
                    loss,
                    task.model_config,
                    valid.ordered,
                    sequences=count,
                    device=task.world.device,
                    progress=lambda _: tick(),
                )
                found["valid_nats_per_token"] = held_out.nats_per_token
        if task.updater.ema is not None:
            found |= test.measure(task.student_rows, "_raw", tick=tick, **how)
        result.clear()
        result.update(found)
        return found

    return evaluate
