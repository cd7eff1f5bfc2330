"""The parts of a distillation, from its settings: student, texts, the teacher's bank, the task."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from didi_instruct.api.open import open_source
from didi_instruct.api.runs import open_data_together
from didi_instruct.api.sources import PrepareBar
from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.bank import BankSettings, Progress, open_bank
from didi_instruct.distillation.didi import DidiTask
from didi_instruct.distillation.mixture import MixtureTask
from didi_instruct.distillation.task import DistillTask, Teacher
from didi_instruct.distillation.token_matching import TokenMatchingTask
from didi_instruct.errors import UserError
from didi_instruct.evaluation.likelihood import check_data
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.dit import DiT
from didi_instruct.models.masked_lm import MaskedLM
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import Canvas, Draw
from didi_instruct.sampling.network import NetworkDenoiser
from didi_instruct.seeding import mix
from didi_instruct.training.pretrain import uses_bf16
from didi_instruct.training.world import World

if TYPE_CHECKING:
    from didi_instruct.distillation.rollout import References

BankBar = Callable[[], Any]
"""Opens a progress display (`Progress`) for as long as a bank is being drawn."""


def denoiser_of(loaded: LoadedModel, source: str) -> DiT:
    """The network of a model that these methods can distil."""
    if isinstance(loaded.model, MaskedLM):
        raise UserError(
            f"{source} is a masked LM of transformers: only networks of the DiT family can be "
            "distilled."
        )
    if not isinstance(loaded.model, DiT) or loaded.config.kind != "mdlm":
        raise UserError(
            f"{source} is a model of kind `{loaded.config.kind}`: these methods distil masked "
            "diffusion models (`mdlm`)."
        )
    return loaded.model


def open_student(config: DistillConfig, teacher: LoadedModel, source: str) -> DiT:
    """Where the student starts: a copy of the teacher, or a model that speaks its tokens."""
    network = denoiser_of(teacher, source)
    if teacher.config.masks > 1:
        raise UserError(
            f"{source}: the teacher has {teacher.config.masks} masks (mixture steps): distil what "
            "it was distilled from."
        )
    if config.student is None:
        # Copied tensors: those of a loaded model are views of its file.
        return copy.deepcopy(network)
    other = config.student
    loaded = open_source(other)
    student = denoiser_of(loaded, other)
    hashes = [m.tokenizer.hash if m.tokenizer else None for m in (teacher, loaded)]
    if hashes[0] != hashes[1] or loaded.config.num_tokens != teacher.config.num_tokens:
        raise UserError(
            f"{other} (the student) and {source} (the teacher) have different tokenizers: "
            "distillation compares them token by token."
        )
    if loaded.config.schedule != teacher.config.schedule:
        raise UserError(
            f"{other} (the student) and {source} (the teacher) have different noise schedules: "
            "their times would not mean the same."
        )
    if loaded.config.length < teacher.config.length:
        raise UserError(
            f"{other} (the student) reads at most {loaded.config.length} tokens, the teacher "
            f"{teacher.config.length}."
        )
    masks, codes = loaded.config.masks, config.mixture.codes
    if masks > 1 and (config.method != "mixture" or masks > codes):
        raise UserError(
            f"{other} (the student) has {masks} masks: use method=mixture with mixture.codes "
            f"{masks} or more, or another student."
        )
    return copy.deepcopy(student)


def open_texts(
    config: DistillConfig,
    teacher: LoadedModel,
    tokenizer: str,
    folder: Path,
    world: World,
    progress: PrepareBar,
) -> tuple[TokenSource | None, TokenSource | None]:
    """Training text and held-out text, if the recipe names any, in the teacher's tokens.

    `tokenizer` is where its tokenizer is.
    """
    if not config.data.source:
        return None, None
    settings = replace(config.data, tokenizer=tokenizer)
    data, valid = open_data_together(
        settings, folder, world, progress, length=teacher.config.length, seed=config.train.seed
    )
    check_data(teacher.config, teacher.tokenizer.hash if teacher.tokenizer else None, data)
    return data, valid


def make_task(
    config: DistillConfig,
    teacher: Teacher,
    student: DiT,
    world: World,
    data: TokenSource | None,
    folder: Path,
    progress: BankBar,
) -> DistillTask:
    """The method of the settings, with the texts it compares with."""
    if config.method == "token-matching":
        return TokenMatchingTask(config, teacher, student, world, data=data)
    references: References | None = None
    if config.reference.source == "data":
        assert data is not None
        references = data.rows
    elif config.reference.source == "bank":
        references = _bank(config, teacher, world, data, folder, progress).rows
    kind = DidiTask if config.method == "didi" else MixtureTask
    return kind(config, teacher, student, world, references=references, data=data)


def _bank(
    config: DistillConfig,
    teacher: Teacher,
    world: World,
    data: TokenSource | None,
    folder: Path,
    progress: BankBar,
) -> TokenSource:
    """Teacher samples on disk, drawn now where they are missing."""
    model, reference = teacher.network.config, config.reference
    length = model.length if data is None else data.length
    settings = BankSettings(
        teacher=teacher.fingerprint,
        steps=reference.steps,
        rows=reference.rows,
        length=length,
        num_tokens=model.num_tokens,
        seed=reference.seed,
        prompt=config.prompt,
        prompts=data.fingerprint if data is not None and config.prompt else "",
    )
    schedule = make_schedule(model.schedule)
    denoiser = NetworkDenoiser(teacher.network, schedule)
    seed, bf16 = mix(reference.seed, "bank"), uses_bf16(config.train, world.device)
    mask_id = model.mask_id
    assert mask_id is not None
    if teacher.tokenizer is None:
        raise UserError("The teacher has no tokenizer: use reference.source=online or data.")

    def draw(first: int, count: int) -> Tensor:
        tokens = torch.full((count, length), mask_id, device=world.device)
        if config.prompt:
            assert data is not None
            given = data.rows(first, count)[:, : config.prompt]
            tokens[:, : config.prompt] = given.to(world.device)
        indices = torch.arange(first, first + count, device=world.device)
        canvas = Canvas(tokens, mask_id, indices)
        with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=bf16):
            drawn = ancestral(
                denoiser, schedule, canvas, steps=reference.steps, settings=Draw(seed=seed)
            )
        return drawn.tokens.cpu()

    where = Path(reference.bank) if reference.bank else folder / "bank"
    with progress() as bar:
        report: Progress | None = bar if world.is_main else None
        return open_bank(
            where,
            settings,
            draw,
            teacher.tokenizer,
            world=world,
            seed=config.train.seed,
            progress=report,
        )
