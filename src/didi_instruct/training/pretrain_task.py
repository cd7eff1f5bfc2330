"""Training by likelihood as a task of the loop: a denoiser or AR model on a stream of rows."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import CurriculumConfig, OptimConfig, TrainConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.dit import build_model, flops_per_token
from didi_instruct.process.masking import before_end
from didi_instruct.seeding import mix
from didi_instruct.training import distributed, objectives
from didi_instruct.training.buckets import plan_passes, widths
from didi_instruct.training.distributed import World
from didi_instruct.training.objectives import Batch, Objective
from didi_instruct.training.optim import learning_rate
from didi_instruct.training.replica import Replica, exchanging

Save = Callable[[Path, Mapping[str, Tensor], dict[str, Any]], None]
"""Writes a state dict, with facts about the run, into a folder."""


class Settings(Protocol):
    """Settings of a run that a task reads."""

    @property
    def reproduces(self) -> str: ...

    @property
    def optim(self) -> OptimConfig: ...

    @property
    def train(self) -> TrainConfig: ...


class Read(NamedTuple):
    """Rows of a batch that are read in one pass."""

    rows: slice | Tensor
    """Their places in the batch."""
    tokens: Tensor
    """(R, width), or (R, 2, width) for prompts with answers."""
    weight: float
    """Of a mean over the width, in the loss."""
    last: bool
    """True for the last pass of this process over the batch."""


class PretrainTask:
    """Training by likelihood as a `training.loop.Task`: a step is one global batch, fresh noise."""

    def __init__(
        self,
        config: Settings,
        model_config: ModelConfig,
        data: TokenSource,
        world: World,
        *,
        network: Any = None,
        objective: Objective | None = None,
        curriculum: CurriculumConfig | None = None,
        pass_tokens: int | None = None,
        identity: Mapping[str, str] | None = None,
        provenance: Mapping[str, Any] | None = None,
        save: Save | None = None,
    ) -> None:
        """Train `network`, by default a new one, by `objective`, by default that of its kind.

        `pass_tokens` bounds the positions of a forward pass, of rows of similar length: for texts
        with windows of their own, and networks that do not read what fills a window.
        `identity` is what a resumed run must share with its checkpoint beside the data, by name;
        `provenance` is written into all models of the run, by `save` (folder, state dict,
        provenance), by default as whole models.
        """
        train = config.train
        if train.batch_size % world.size:
            raise UserError(
                f"train.batch_size is {train.batch_size}, which {world.size} processes "
                "cannot share equally."
            )
        if data.length > model_config.length:
            raise UserError(
                f"The data has rows of {data.length} tokens, but model.length is "
                f"{model_config.length}: prepare it with --length {model_config.length} "
                f"or set model.length={data.length}."
            )
        self.config, self.model_config, self.data, self.world = config, model_config, data, world
        self.curriculum = curriculum or CurriculumConfig()
        self._identity = {"data": data.fingerprint, **(identity or {})}
        self._provenance = {"reproduces": config.reproduces, **(provenance or {})}
        self._save = save or self._save_whole
        self.pass_tokens = pass_tokens
        self._read = 0  # tokens of this process since the last report, and those of texts
        self._text = 0
        torch.manual_seed(mix(train.seed, "init"))
        # CUDA graphs are for the passes of a distillation.
        passes = replace(train, compile="auto") if train.compile == "graphs" else train
        network = build_model(model_config) if network is None else network
        given = network, passes, world, config.optim
        self.replica = Replica(*given, steps=train.steps, ema=train.ema)
        self.model = self.replica.network.train()
        compiles = distributed.compiles(train, world.device)
        self.objective = objective or objectives.make_objective(model_config, compile=compiles)
        self.sharded = distributed.shards_checkpoints(train, world)

    def step(self, step: int) -> dict[str, Tensor]:
        """Accumulate the gradients of this process's share of the batch, then update."""
        train, objective = self.config.train, self.objective_at(step)
        generator = torch.Generator().manual_seed(mix(train.seed, "noise", step))
        noise = objective.draw(train.batch_size, generator)
        torch.manual_seed(mix(train.seed, "dropout", step, self.world.rank))
        total = torch.zeros((), device=self.world.device)
        for read in self._reads(step * train.batch_size):
            batch = self._batch(objective, read.tokens, *(n[read.rows] for n in noise))
            with exchanging(read.last):
                loss = self.losses(batch).sum() * (read.weight / train.batch_size)
                self.replica.backward(loss)
            total += loss.detach()
        return {"loss": self.world.sum(total), "grad_norm": self.replica.update(step)}

    def losses(self, batch: Batch) -> Tensor:
        """Nats per token of each sequence of a batch, (B,); softened tokens tell so themselves."""
        found: Tensor = self.replica.run(lambda network: self.objective.loss(network, batch))
        return found

    @property
    def rows_per_pass(self) -> int:
        """Sequences of a forward pass of this process.

        Where the recipe does not say: its whole share of the batch on a GPU; on a CPU few at a
        time, which is no slower and fits a laptop.
        """
        if self.config.train.micro_batch is not None:
            return self.config.train.micro_batch
        if self.pass_tokens is not None:
            return max(1, self.pass_tokens // self.data.length)
        share = len(self.world.share(self.config.train.batch_size))
        if self.world.device.type == "cuda":
            return share
        return max(1, min(share, distributed.CPU_TOKENS // self.data.length))

    def objective_at(self, step: int) -> Objective:
        """Return the objective of a step: on softened tokens while a curriculum lasts."""
        temperature = objectives.temperature_at(step, self.curriculum)
        if temperature is None:
            return self.objective
        return objectives.SoftObjective(self.model_config, temperature, self.curriculum.tokens)

    def _reads(self, position: int) -> Iterator[Read]:
        """Divide this process's rows of the batch at a position of the stream into passes."""
        count, world = self.config.train.batch_size, self.world
        if self.pass_tokens is None:
            share, size = world.share(count), self.rows_per_pass
            for first in range(share.start, share.stop, size):
                rows = slice(first, min(first + size, share.stop))
                tokens = self.data.rows(position + rows.start, rows.stop - rows.start)
                yield Read(rows, tokens, 1.0, rows.stop == share.stop)
            return
        batch = self.data.rows(position, count)
        passes = plan_passes(
            widths(batch, self.model_config), self.pass_tokens, world.rank, world.size
        )
        for number, (places, width) in enumerate(passes, 1):
            tokens = batch[places, :width]
            yield Read(places, tokens, width / self.data.length, number == len(passes))

    def _batch(self, objective: Objective, tokens: Tensor, *noise: Tensor) -> Batch:
        self._read += len(tokens) * tokens.shape[-1]
        if self.pass_tokens is not None and self.model_config.end_id is not None:
            self._text += int(before_end(tokens, self.model_config.end_id).sum())
        batch = objective.corrupt(tokens, *noise)
        if self.world.device.type == "cuda":
            batch = {name: value.pin_memory() for name, value in batch.items()}
        return {n: v.to(self.world.device, non_blocking=True) for n, v in batch.items()}

    def describe(self, step: int, seconds: float, steps: int) -> dict[str, float]:
        """Learning rate, tokens per second, padding and, on a GPU, the share of its matmul rate."""
        train, rows = self.config.train, steps * self.config.train.batch_size
        # Rows of answers are as long as the longest of a pass: the mean, in this process.
        text, read = self._text * self.world.size, self._read * self.world.size
        self._text = self._read = 0
        rate = read / max(seconds, 1e-9)
        lr = learning_rate(step, train.steps, self.config.optim)
        values = {"lr": lr, "tokens_per_second": rate}
        if self.pass_tokens is not None:
            values["padding"] = 1 - text / max(read, 1)  # share of the tokens that fills windows
        if self.world.device.type == "cuda":
            share, length = self.objective.head_fraction, round(read / rows)
            flops = 3 * flops_per_token(self.model_config, share, length)  # backward: twice forward
            values["mfu"] = rate * flops / (self.world.size * matmul_rate(self.world.device))
        return values

    def checkpoint_bytes(self) -> int:
        return self.replica.bytes

    def identity(self) -> Mapping[str, Any]:
        # Positions in the stream of data follow from the step.
        return self._identity

    def tensors(self) -> Mapping[str, Tensor]:
        return self.replica.tensors()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the network is in evaluation mode, with the averaged weights in place."""
        self.model.eval()
        try:
            with self.replica.averaged():
                yield
        finally:
            self.model.train()

    def write_model(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write the averaged model in the layout that `didi.load` reads; all processes call."""
        state = self.replica.product()
        if self.world.is_main:
            self._save(folder, state, {**self._provenance, **(provenance or {})})

    def _save_whole(self, folder: Path, state: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        tokenizer, record = self.data.tokenizer, self.model.record
        save_model(
            folder, state, self.model_config, tokenizer=tokenizer, provenance=facts, record=record
        )


@functools.cache
def matmul_rate(device: torch.device) -> float:
    """Measured bf16 matmul FLOP/s of a GPU: the ceiling that MFU is told against.

    The fastest of some products, since others may use the GPU at the same time: a little more than
    it sustains.
    """
    n = 8192
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    b = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * n**3 / min(seconds)
