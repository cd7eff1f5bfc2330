"""The parts that all methods of distillation share, and the one task of the training loop.

`Distillation` holds the student, its teacher, the batch and its noise. A `Method` is an object with
`step`; a `MethodEntry` tells the rest of the package all it needs to know of one.
Everything random is a function of (seed, iteration, index of the text in the batch), so processes
and passes may share a batch as they like.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from didi_instruct.adapters.files import save_adapters
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import ModelConfig
from didi_instruct.config.train import TrainConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.distillation import rollout
from didi_instruct.distillation.losses import terms
from didi_instruct.distillation.rollout import References, Starts
from didi_instruct.distillation.watch import ENOUGH_TEXTS
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.compile import fusing
from didi_instruct.models.layers import ALIGN
from didi_instruct.models.network import Network, states_at, window_of
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import plain
from didi_instruct.sampling.denoiser import Logits, LogitsDenoiser
from didi_instruct.sampling.draw import Noise, Purpose
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.sampling.state import Reads, without_padding
from didi_instruct.seeding import mix
from didi_instruct.training import replica
from didi_instruct.training.distributed import CPU_TOKENS, World, compiles, shards_checkpoints
from didi_instruct.training.loop import Metrics
from didi_instruct.training.optim import learning_rate
from didi_instruct.training.replica import Replica
from didi_instruct.transfer import sent

T = TypeVar("T")
Loss = tuple[Tensor, Metrics]
"""A pass's share of a loss, 0-d, and of numbers for the log."""

USUAL_STEPS = 8
"""Steps to try a student with that has learnt them among others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The model to be distilled."""

    network: Network
    tokenizer: Tokenizer | None
    fingerprint: str  # of its weights
    source: str = ""  # the SOURCE it was opened from


class Method(Protocol):
    """A method of distillation: the networks it trains beside the student, and an iteration."""

    @property
    def learners(self) -> Mapping[str, Replica]:
        """Saved beside the student under these names; a `discriminator` is part of the product."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Other tensors of a checkpoint, by name."""

    def step(self, step: int) -> Metrics:
        """Update the networks once; return 0-d tensors, those that mean something this time."""


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """A method as the rest of the package knows it."""

    networks: Callable[[DistillConfig, Any, Any], tuple[Any, Any]]
    """(settings, teacher, student) -> student and second network (or None), made of the two
    networks before these are replicated."""
    make: Callable[..., Method]
    """(distillation, second network, options of the method's own) -> method."""
    check: Callable[[DistillConfig, ModelConfig], None] = lambda config, teacher: None
    """Refuse settings that do not fit a teacher."""
    sampling_flags: Callable[[DistillConfig], str]
    """Flags of `didi generate` for what the student has learnt."""

    # Teacher, student and texts
    texts: Literal["", "reference", "data"] = ""
    """Texts that the student learns from: none, those of `reference.source`, training text."""
    teacher_kind: Literal["mdlm", "duo"] = "mdlm"
    any_order: bool = False  # every order of revealing is known, whatever the settings
    several_masks: bool = False  # students may have several masks
    starts_masked: bool = True  # samples of the student start from masks alone

    # Training: learning rates and collapses in messages, and how passes are run
    lr_setting_names: str = "optim.lr"  # settings that are learning rates, in words
    collapse_metric: str | None = None  # the number of the log that a collapse is told from
    restraint: str = ""  # the setting that holds a student back from a collapse
    pads: bool = True
    """Logits may have columns of probability 0 behind the tokens: not where columns are counted."""
    recurring_passes: Callable[[DistillConfig], bool] = lambda config: False
    """True where an iteration has few passes, the same ones in each: CUDA graphs pay then."""


def budget_flags(budgets: tuple[int, ...]) -> str:
    """Flags of `didi generate` for a student that has learnt some step counts."""
    return f"--steps {USUAL_STEPS if USUAL_STEPS in budgets else max(budgets)}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Texts of one pass of this process."""

    step: int
    turn: int  # which batch of the iteration
    indices: Tensor  # (B,) of the texts in the batch; on the host
    noise: Noise


class Distillation:
    """The student, its teacher, the batch and its parts, noise and texts."""

    def __init__(
        self,
        config: DistillConfig,
        entry: MethodEntry,
        teacher: Teacher,
        student: Network,
        world: World,
        *,
        data: TokenSource | None = None,
        references: References | None = None,
    ) -> None:
        """Replicate student and teacher; `references` are by default drawn from the teacher."""
        own: Any = student
        network: Any = teacher.network
        if config.continues and data is None:
            raise ValueError("prompts come from data: give some")
        if own.config.end_id != network.config.end_id:
            raise ValueError("student and teacher end their texts in different ways")
        self.config, self.entry, self.world, self.data = config, entry, world, data
        self.tokenizer, self.fingerprint = teacher.tokenizer, teacher.fingerprint
        self.model_config: ModelConfig = own.config
        self.length = window_of(network) if data is None else data.length
        self.padded = bool(config.prompts.source)
        """True where texts have padding, before their prompts."""
        given = self.length - config.prompts.length if self.padded else config.prompt
        self.starts = Starts(network.config, self.length, given)
        self.mask_id = self.starts.mask_id
        self.schedule = make_schedule(own.config.schedule)
        pads = entry.pads and replica.pays_to_pad(world.device)
        self.align = ALIGN if pads else 1
        if pads:
            own.align = network.align = ALIGN
        self.train = self._train_settings()
        own.requires_grad_(True)
        steps, ema = config.updates, self.train.ema
        self.student = Replica(own, self.train, world, config.optim, steps=steps, ema=ema)
        self.teacher = self.frozen(network)
        self.teacher_logits: Logits = torch.no_grad()(self.teacher.logits)
        self.teacher_log_probs: Logits = torch.no_grad()(self.teacher.log_probs)
        self.references = references or self.teacher_texts

    def _train_settings(self) -> TrainConfig:
        """Settings of training, with CUDA graphs where they pay."""
        train = self.config.train
        if self.config.lora.rank:  # adapters are small: each process has them whole
            return replace(train, strategy="ddp")
        # Not where texts have windows of their own, or a batch is more than one pass.
        alike = self.model_config.end_id is None and len(self._parts()) == 1
        if train.compile == "auto" and alike and self.entry.recurring_passes(self.config):
            return replace(train, compile="graphs")
        return train

    def frozen(self, network: Any) -> Replica:
        """A network that does not learn: the teacher, or one that takes the student's weights."""
        return Replica(network.requires_grad_(False), self.train, self.world)

    def learner(
        self, network: Any, lr: float, weight_decay: float | None = None, warmup: int = 0
    ) -> Replica:
        """A second network that learns from what the student draws, at a constant rate.

        The rate is reached after `warmup` updates. Weight decay is by default the student's.
        """
        network.align = self.align
        optim = replace(self.config.optim, lr=lr, schedule="constant", warmup=warmup)
        if weight_decay is not None:
            optim = replace(optim, weight_decay=weight_decay)
        return Replica(network, self.train, self.world, optim, steps=self.config.iterations)

    def learns(self, step: int) -> bool:
        """True once the student learns: after the warm-up."""
        return step >= self.config.warmup

    def descend(self, step: int, loss_of: Callable[..., Loss], *parts: Sequence[Any]) -> Metrics:
        """Update the student by the losses of all passes, made one by one; sum up their numbers.

        `loss_of` takes an item of each of the `parts`, which have one for each pass.
        """
        found = []
        for part in self.passes(list(zip(*parts, strict=True))):
            loss, numbers = loss_of(*part)
            self.student.backward(loss)
            found.append({"loss": loss} | numbers)
        return self.summed(found) | self.apply_gradients(step)

    def passes(self, parts: Sequence[T]) -> Iterator[T]:
        """The parts one by one; processes exchange gradients in the pass of the last."""
        for number, part in enumerate(parts, start=1):
            with replica.exchanging(number == len(parts)):
                yield part

    def apply_gradients(self, step: int) -> Metrics:
        """Update the student by its gradients of an iteration."""
        return {"grad_norm": self.student.update(step - self.config.warmup)}

    # Numbers

    def summed(self, parts: Sequence[Metrics]) -> Metrics:
        """Sums of the numbers of all passes and processes, by name: float64."""
        own = [torch.stack([v.detach().double() for v in part.values()]) for part in parts]
        total = self.world.sum(own[0] if len(own) == 1 else torch.stack(own).sum(0))
        return dict(zip(parts[0], total, strict=True))

    def count(self, counts: Iterable[Tensor]) -> Tensor:
        """Sum of counts over all passes and processes, 1 at least: float64."""
        own = torch.stack(list(counts)).sum(0).double()
        return self.world.sum(sent(own, self.world.device)).clamp(min=1)

    def generator(self, *name: int | str) -> torch.Generator:
        """Random numbers for the whole batch of an iteration, on the host."""
        return torch.Generator().manual_seed(mix(self.config.train.seed, *name))

    def number(self, value: float) -> Tensor:
        """A plain number as a metric."""
        return torch.full((), value, dtype=torch.float64, device=self.world.device)

    # The batch

    def micro_batches(self, step: int, turn: int = 0) -> list[MicroBatch]:
        """The passes of this process over one batch of an iteration."""
        seed = mix(self.config.train.seed, self.config.method, step, turn)
        return [
            MicroBatch(step, turn, own, Noise(seed, own, device=self.world.device))
            for own in self._parts()
        ]

    def _parts(self) -> list[Tensor]:
        """Indices of the texts of each pass of this process: whole groups, as many as fit."""
        share = self.world.share(self.config.train.batch_size)
        group, size = self.config.group_size, self.config.train.micro_batch
        if size is None:
            size = len(share) if self.world.device.type == "cuda" else CPU_TOKENS // self.length
        size = max(group, size // group * group)
        return list(torch.split(torch.arange(share.start, share.stop), size))

    # Texts

    def prompts(self, first: int, indices: Tensor) -> Tensor | None:
        """Texts of the data to be continued, on the host: one for each of consecutive indices.

        They are counted from row `first` on. None: nothing is to be continued.
        """
        if not self.config.continues:
            return None
        assert self.data is not None
        return self.data.rows(first + int(indices[0]), len(indices))

    def reads(self, z: Tensor) -> Reads:
        """Texts (U, L) as networks read them."""
        return without_padding(z) if self.padded else Reads(z)

    def teacher_states(self, reads: Reads, at: Tensor) -> Tensor:
        """States (R, d) of a teacher without time, for `teacher_head`; `at` may be on the host."""
        at = sent(at, self.world.device)
        with torch.no_grad():
            return self.teacher.run(
                lambda network: states_at(network, reads.tokens, at, reads.attended)
            )

    def teacher_head(self, states: Tensor) -> Tensor:
        """Logits (R, V) of the teacher at its states (R, d)."""
        return self.teacher.run(lambda network: network.head(states))

    def reference_texts(self, batch: MicroBatch) -> Tensor:
        """One reference text for each text of a part: (B, L)."""
        first = batch.step * self.config.train.batch_size + int(batch.indices[0])
        return sent(self.references(first, len(batch.indices)), self.world.device)

    def teacher_texts(self, start: int, count: int) -> Tensor:
        """Texts start .. start + count - 1 drawn from the teacher, with prompts from the data."""
        indices, seed = torch.arange(start, start + count), mix(self.config.train.seed, "teacher")
        noise = Noise(seed, indices, device=self.world.device)
        begin, state = self.starts(noise.planned, self.prompts(0, indices))
        times = torch.linspace(1, 0, self.config.reference.steps + 1, dtype=torch.float64)
        order = noise.planned.uniforms(self.length, Purpose.REVEAL)
        given = begin, state, times.expand(count, -1), order, noise, self.mask_id
        draw = plain(LogitsDenoiser(self.teacher_logits, self.mask_id))
        return rollout.walk(draw, self.schedule, *given)[0].z

    # Where texts start: the one state that all share, or windows that stand for all

    @cached_property
    def teacher_at_start(self) -> Tensor:
        """Logits (R, V) of the teacher where all is masked: a constant of the run."""
        return self._at_start(self.teacher_logits)

    def start_metrics(self, step: int) -> Metrics:
        """`kl_start` where a usual entry of the log follows (not one for a signal's sake)."""
        done, train, end = step + 1, self.config.train, self.config.iterations
        logs = done % train.log_every == 0 or done % train.save_every == 0 or done == end
        return {"kl_start": self.kl_at_start()} if logs else {}

    @torch.no_grad()
    def kl_at_start(self) -> Tensor:
        """KL(teacher ‖ student) per token where all is masked."""
        student = self._at_start(self.student.logits)
        return terms(student, self.teacher_at_start).distance.mean()

    def _at_start(self, logits: Logits) -> Tensor:
        start = self.starts.representative(rollout.HOST)
        z = sent(start, self.world.device)
        t = torch.ones(len(start), dtype=torch.float64, device=z.device)
        return logits(Reads(z), t, flat_positions(start == self.mask_id))


class DistillTask:
    """A method of distillation as a task of the training loop (`training.loop.Task`)."""

    def __init__(self, distillation: Distillation, method: Method) -> None:
        self.distillation, self.method, d = distillation, method, distillation
        self.config, self.entry, self.world = d.config, d.entry, d.world
        self.parts: dict[str, Replica] = {"student": d.student, **method.learners}
        self.sharded = shards_checkpoints(d.train, d.world)
        self.variety_at_start = torch.zeros(1, dtype=torch.float64, device=d.world.device)
        """Mean of the collapse metric over the first texts, before much is learnt."""

    def step(self, step: int) -> Metrics:
        self.distillation.student.release()
        compiled = compiles(self.config.train, self.world.device)
        with fusing(compiled), replica.iterating():
            metrics = self.method.step(step)
        metric = self.entry.collapse_metric
        if metric is not None and step * self.config.train.batch_size < ENOUGH_TEXTS:
            self.variety_at_start.lerp_(metrics[metric].double(), 1 / (step + 1))
        return metrics

    def describe(self, step: int, seconds: float, steps: int) -> dict[str, float]:
        d, train, rate = self.distillation, self.config.train, steps / max(seconds, 1e-9)
        lr, config = 0.0, self.config
        if d.learns(step):
            lr = learning_rate(step - config.warmup, config.updates, config.optim)
        return {
            "lr": lr,
            "iterations_per_second": rate,
            "tokens_per_second": rate * train.batch_size * d.length,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        found = {
            f"{part}/{name}": tensor
            for part, learner in self.parts.items()
            for name, tensor in learner.tensors().items()
        }
        if self.entry.collapse_metric is not None:
            found["watch/variety_at_start"] = self.variety_at_start
            # Checkpoints of all methods that draw have it, even without a discriminator.
            found["watch/accuracy"] = torch.zeros(2, dtype=torch.float64)
        return found | dict(self.method.state)

    def checkpoint_bytes(self) -> int:
        return sum(learner.bytes for learner in self.parts.values())

    def identity(self) -> Mapping[str, Any]:
        data = self.distillation.data
        return {
            "teacher": self.distillation.fingerprint,
            "data": None if data is None else data.fingerprint,
        }

    def write_model(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write the averaged student, and the discriminator if there is one."""
        d, critic = self.distillation, self.parts.get("discriminator")
        student, discriminator = d.student.product(), None if critic is None else critic.product()
        provenance = {"reproduces": self.config.reproduces, **(provenance or {})}
        if not self.world.is_main:
            return
        if self.config.lora.rank:
            both = None
            if critic is not None and discriminator is not None:
                both = discriminator, critic.network.config
            save_adapters(folder, d.student.network, student, provenance, both)
        else:
            save_model(
                folder,
                student,
                d.model_config,
                tokenizer=d.tokenizer,
                discriminator=discriminator,
                provenance=provenance,
                discriminator_config=None if critic is None else critic.network.config,
                record=d.student.network.record,
                discriminator_record=None if critic is None else critic.network.record,
            )
