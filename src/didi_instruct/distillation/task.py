"""What all methods of distillation share: the networks, their state, the batch and its parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.pretrain import TrainConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation.hosting import (
    Host,
    iterating,
    logits_of,
    pays_to_pad,
    rows_of,
)
from didi_instruct.distillation.monitor import Totals
from didi_instruct.distillation.rollout import HOST, Noise, Rows, walk
from didi_instruct.distillation.starts import Starts
from didi_instruct.distillation.terms import terms
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.compile import fusing
from didi_instruct.models.dit import DiT, Trunk
from didi_instruct.models.layers import ALIGN
from didi_instruct.process.schedule import make_schedule
from didi_instruct.seeding import mix
from didi_instruct.training.distributed import CPU_TOKENS, World, compiles
from didi_instruct.training.optim import Updater, learning_rate
from didi_instruct.transfer import sent

ENOUGH_TEXTS = 256
"""Texts behind an average by which a collapse is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The model to be distilled."""

    network: DiT
    tokenizer: Tokenizer | None
    fingerprint: str
    """Of its weights."""
    source: str = ""
    """Where it was found."""
    rows: Rows | None = None
    """A denoiser to follow instead of the network: an exact one, say."""


def check_fit(
    config: DistillConfig, teacher: ModelConfig, *, rows: int | None = None, processes: int = 1
) -> None:
    """Refuse settings that do not fit a teacher, before anything is drawn from it.

    `rows` is the length of the data's rows, where there is data.
    """
    blocks = config.discriminator.trainable_blocks
    if config.method == "didi" and blocks is not None and blocks > teacher.layers:
        raise UserError(
            f"discriminator.trainable_blocks is {blocks}, but the teacher has {teacher.layers} "
            "blocks: use that many, or null for all weights."
        )
    if rows is not None and rows > teacher.length:
        raise UserError(
            f"The data has rows of {rows} tokens, but the teacher reads at most {teacher.length}: "
            f"prepare it with --length {teacher.length}."
        )
    length = teacher.length if rows is None else rows
    if teacher.end_id is not None and length != teacher.length:
        raise UserError(
            f"The data has rows of {rows} tokens, but the teacher's windows, one for each text, "
            f"have {teacher.length}: prepare it with --length {teacher.length}."
        )
    if config.prompt >= length:
        raise UserError(
            f"prompt is {config.prompt}, but texts have {length} tokens: nothing would be left to "
            "write."
        )
    size, group = config.train.batch_size, config.group_size
    if size % (processes * group):
        raise UserError(
            f"train.batch_size is {size}, which {processes} processes cannot share in whole "
            f"groups of {config.group_setting}, {group}."
        )


class StudentTask(ABC):
    """A student that learns from a teacher; see `training.loop.Task`.

    What no mask is needed for. Everything random is a function of (seed, iteration, index of the
    text in the batch), so processes and passes may share a batch as they like.
    """

    rates: str = "optim.lr"
    """The settings that are learning rates, in words."""
    pads: bool = True
    """Whether laws may have more columns than there are tokens, of probability 0, where it pays:
    not where something counts columns."""
    shows_variety: str = "path_entropy"
    """The number of the log that a collapse is told from."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        data: TokenSource | None = None,
    ) -> None:
        self.config, self.world, self.data, self.tokenizer = config, world, data, teacher.tokenizer
        self.model_config = student.config
        if self.pads and teacher.rows is None and pays_to_pad(world.device):
            student.align = teacher.network.align = ALIGN
        self.schedule = make_schedule(student.config.schedule)
        rows = None if data is None else data.length
        check_fit(config, teacher.network.config, rows=rows, processes=world.size)
        self.length = rows or teacher.network.config.length
        train = self.train = self._decided()
        self.student = Host(student.requires_grad_(True), train, world)
        self.teacher_host = Host(teacher.network.requires_grad_(False), train, world)
        schedule = make_schedule(teacher.network.config.schedule)
        given = None if teacher.rows is None else _told_there(teacher.rows)
        self.teacher = given or rows_of(self.teacher_host, schedule)
        self.teacher_logits = given or logits_of(self.teacher_host, schedule)
        self.student_rows = rows_of(self.student, self.schedule)
        self.student_logits = logits_of(self.student, self.schedule)
        self.updater = Updater(student, config.optim, train.steps - config.warmup, train.ema)
        # Moments exist from the start: a checkpoint may come before a network's first update.
        self.updater.prepare_to_load()
        self.sharded = (
            train.strategy == "fsdp" and world.size > 1 and train.checkpoints == "sharded"
        )
        self.variety_at_start = torch.zeros(1, dtype=torch.float64)
        """`shows_variety` of the student's draws before it learns; 0 where nothing is drawn."""
        self._teacher_id = teacher.fingerprint

    def step(self, step: int) -> dict[str, Tensor]:
        """Update the networks once."""
        self.student.forget()
        with fusing(compiles(self.config.train, self.world.device)), iterating():
            return self.iterate(step)

    def _decided(self) -> TrainConfig:
        """The settings of training, and whether graphs of passes pay."""
        train = self.config.train
        if train.compile == "auto" and self.passes_recur():
            return replace(train, compile="graphs")
        return train

    def passes_recur(self) -> bool:
        """Whether an iteration has few passes, of the sizes of the one before."""
        return False

    @abstractmethod
    def iterate(self, step: int) -> dict[str, Tensor]:
        """What an update consists of."""

    def learns(self, step: int) -> bool:
        """Whether the student's turn has come."""
        return step >= self.config.warmup

    # The batch

    def parts(self) -> list[Tensor]:
        """Indices of the texts of each pass of this process: whole groups, as many as fit."""
        share = self.world.share(self.config.train.batch_size)
        group, size = self.config.group_size, self.config.train.micro_batch
        if size is None and self.world.device.type == "cuda":
            size = len(share)
        elif size is None:
            size = CPU_TOKENS // self.length
        size = max(group, size // group * group)
        return list(torch.split(torch.arange(share.start, share.stop), size))

    def noise(self, step: int, turn: int, indices: Tensor) -> Noise:
        """Random numbers of some texts of an iteration's batch; `turn` counts its batches."""
        seed = mix(self.config.train.seed, self.config.method, step, turn)
        return Noise(seed, indices, self.world.device)

    def logs(self, step: int) -> bool:
        """Whether a usual entry of the log follows an iteration: not one for a signal's sake."""
        done, train = step + 1, self.config.train
        return done == train.steps or not all(
            done % every for every in (train.log_every, train.save_every)
        )

    def summed(self, totals: Totals) -> dict[str, Tensor]:
        """Numbers added up over the processes, together."""
        names, values = totals.stacked()
        return dict(zip(names, self.world.sum(values), strict=True))

    def number(self, value: float) -> Tensor:
        """A plain number among those of an iteration."""
        return torch.full((), value, dtype=torch.float64, device=self.world.device)

    # What the loop asks for

    def describe(self, step: int, seconds: float, steps: int) -> dict[str, float]:
        """Learning rate and speed."""
        train, rate = self.config.train, steps / max(seconds, 1e-9)
        lr = 0.0
        if self.learns(step):
            done = step - self.config.warmup
            lr = learning_rate(done, train.steps - self.config.warmup, self.config.optim)
        return {
            "lr": lr,
            "iterations_per_second": rate,
            "tokens_per_second": rate * train.batch_size * self.length,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """The student, its average, the moments."""
        return {f"student/{n}": t for n, t in self.updater.tensors().items()}

    def prepare_to_load(self) -> None:
        """Create the moments."""
        self.updater.prepare_to_load()

    def checkpoint_bytes(self) -> int:
        """Weights, average, moments, and the model to load."""
        return 5 * sum(p.numel() * 4 for network in self.networks() for p in network.parameters())

    def networks(self) -> list[Trunk]:
        """Those that learn."""
        return [self.student.network]

    def identity(self) -> Mapping[str, Any]:
        """The teacher, and the data that positions in the stream refer to."""
        data = None if self.data is None else self.data.fingerprint
        return {"teacher": self._teacher_id, "data": data}

    @contextmanager
    def averaged(self) -> Iterator[DiT]:
        """The student with its averaged weights in place."""
        network = self.student.network
        assert isinstance(network, DiT)
        if self.updater.ema is None:
            yield network
        else:
            with self.updater.ema.applied(network):
                yield network

    def write_model(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write the averaged student, and the discriminator if there is one; all call."""
        with self.averaged() as network:
            student = _whole(network)
        critic = self.discriminator
        discriminator = None if critic is None else _whole(critic)
        if self.world.is_main:
            save_model(
                folder,
                student,
                self.model_config,
                tokenizer=self.tokenizer,
                discriminator=discriminator,
                provenance={"reproduces": self.config.reproduces, **(provenance or {})},
                discriminator_config=None if critic is None else critic.config,
            )

    @property
    def discriminator(self) -> Trunk | None:
        """What is written beside the student."""
        return None


class DistillTask(StudentTask):
    """A student with a mask: one iteration is one global batch of texts, written from masks."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        data: TokenSource | None = None,
    ) -> None:
        super().__init__(config, teacher, student, world, data)
        mask_id = student.config.mask_id
        assert mask_id is not None, "the student of a masked teacher has a mask"
        if config.prompt and data is None:
            raise ValueError("prompts come from data: give some")
        if student.config.end_id != teacher.network.config.end_id:
            raise ValueError("student and teacher end their texts in different ways")
        self.mask_id = mask_id
        self.starts = Starts.of(teacher.network.config, self.length, config.prompt)
        self._teacher_at_start: Tensor | None = None

    def prompts(self, first: int, indices: Tensor) -> Tensor | None:
        """Texts of the data that are to be continued, one for each of consecutive indices.

        They are counted from row `first` on, and on the host. None: nothing is to be continued.
        """
        if not self.config.prompt:
            return None
        assert self.data is not None
        return self.data.rows(first + int(indices[0]), len(indices))

    def teacher_texts(self, start: int, count: int) -> Tensor:
        """Reference texts drawn from the teacher for this iteration, with prompts from the data."""
        indices = torch.arange(start, start + count)
        noise = Noise(mix(self.config.train.seed, "teacher"), indices, self.world.device)
        begin, owner = self.starts(noise.on_host, self.prompts(0, indices))
        times = torch.linspace(1, 0, self.config.reference.steps + 1, dtype=torch.float64)
        return walk(
            self.teacher_logits,
            self.schedule,
            begin,
            owner,
            times.expand(count, -1),
            noise,
            self.mask_id,
        ).z

    # The teacher where texts start: the one state that all share, or windows that stand for all

    def teacher_at_start(self) -> Tensor:
        """Logits (R, V) of the teacher where all is masked: a constant of the run."""
        if self._teacher_at_start is None:
            self._teacher_at_start = self._at_start(self.teacher_logits)
        return self._teacher_at_start

    def watched(self, step: int) -> dict[str, Tensor]:
        """What takes a pass of its own: told once for an entry of the log.

        `kl_start` is KL(teacher ‖ student) per token where all is masked.
        """
        return {"kl_start": self.kl_at_start()} if self.logs(step) else {}

    @torch.no_grad()
    def kl_at_start(self) -> Tensor:
        """KL(teacher ‖ student) per token where all is masked."""
        return terms(self._at_start(self.student_logits), self.teacher_at_start()).distance.mean()

    def _at_start(self, rows: Rows) -> Tensor:
        start = self.starts.watched(HOST)
        there = sent(start, self.world.device)
        time = torch.ones(len(start), dtype=torch.float64, device=there.device)
        return rows(there, time, start == self.mask_id)


def _told_there(rows: Rows) -> Rows:
    """A denoiser that is told where to look on the device of the states."""
    return lambda z, t, where: rows(z, t, sent(where, z.device))


def _whole(network: nn.Module) -> dict[str, Tensor]:
    """State of a network, gathered from all processes if it is sharded."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in network.state_dict().items()
    }
