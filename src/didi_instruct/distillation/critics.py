"""Tasks with a second network, which learns from what the student draws."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.hosting import Host
from didi_instruct.distillation.monitor import RunningMean
from didi_instruct.distillation.task import ENOUGH_TEXTS, DistillTask, Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT, Trunk
from didi_instruct.training.distributed import World
from didi_instruct.training.optim import Updater

BEFORE = 1_000_000
"""Turn of the first of the batches that are drawn before anything is learnt."""


class CriticTask(DistillTask):
    """A task with a second network, which learns from what the student draws."""

    critic_name: str
    """What it is called in a checkpoint."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        critic: Trunk,
        critic_lr: float,
        world: World,
        data: TokenSource | None = None,
    ) -> None:
        super().__init__(config, teacher, student, world, data)
        if student.config.masks > 1:
            raise UserError(
                f"The student has {student.config.masks} masks, which {config.method} does not "
                "know: use method=mixture, or another student."
            )
        if isinstance(critic, DiT):
            critic.align = student.align
        self.critic = Host(critic, self.train, world)
        optim = replace(config.optim, lr=critic_lr, schedule="constant", warmup=0)
        self.critic_updater = Updater(critic, optim, config.train.steps, ema=0.0)
        self.critic_updater.prepare_to_load()
        self.accuracy = RunningMean()

    @abstractmethod
    def drawn_variety(self, turn: int) -> Tensor:
        """`shows_variety` of a batch that nobody learns from."""

    def remember_variety(self, step: int) -> None:
        """Measure how varied the student's draws are, before the first iteration."""
        if step > 0:
            return
        batches = -(-ENOUGH_TEXTS // self.config.train.batch_size)
        found = []
        for turn in range(batches):
            self.student.forget()
            found.append(self.drawn_variety(BEFORE + turn))
        self.variety_at_start.fill_(float(torch.stack(found).mean()))

    def tensors(self) -> Mapping[str, Tensor]:
        """Both networks, the student's average, the moments, the memory of the gates."""
        return {
            **super().tensors(),
            **{f"{self.critic_name}/{n}": t for n, t in self.critic_updater.tensors().items()},
            "watch/accuracy": self.accuracy.state,
            "watch/variety_at_start": self.variety_at_start,
        }

    def prepare_to_load(self) -> None:
        """Create the moments of both optimizers."""
        super().prepare_to_load()
        self.critic_updater.prepare_to_load()

    def networks(self) -> list[Trunk]:
        """Both."""
        return [*super().networks(), self.critic.network]

    @property
    def discriminator(self) -> Trunk | None:
        """The critic, where it is one: an auxiliary denoiser is not kept."""
        return self.critic.network if self.critic_name == "discriminator" else None


class AuxiliaryTask(CriticTask):
    """Student and auxiliary denoiser, which begins as the teacher, in turns."""

    critic_name = "auxiliary"

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher,
        student: DiT,
        world: World,
        *,
        data: TokenSource | None = None,
    ) -> None:
        auxiliary = copy.deepcopy(teacher.network).requires_grad_(True)
        super().__init__(config, teacher, student, auxiliary, config.aux_lr, world, data)
