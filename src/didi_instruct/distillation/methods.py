"""The methods of distillation by name. A new one is a file with an entry, its settings, a line."""

from typing import Any

from didi_instruct.adapters.lora import adapt
from didi_instruct.config.distill import DistillConfig
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation import didi, dimo, duo, mixture, sdtt, token_matching
from didi_instruct.distillation.rollout import References
from didi_instruct.distillation.run import Distillation, DistillTask, MethodEntry, Teacher
from didi_instruct.errors import UserError
from didi_instruct.models.network import Network, window_of
from didi_instruct.training.distributed import World, shard_frozen, shards

METHODS: dict[str, MethodEntry] = {
    "didi": didi.ENTRY,
    "token-matching": token_matching.ENTRY,
    "mixture": mixture.ENTRY,
    "sdtt": sdtt.ENTRY,
    "dimo": dimo.ENTRY,
    "duo": duo.ENTRY,
}


def make_task(
    config: DistillConfig,
    teacher: Teacher,
    student: Network,
    world: World,
    *,
    data: TokenSource | None = None,
    references: References | None = None,
    **options: Any,
) -> DistillTask:
    """The task of the settings' method; `references` are texts to learn from or compare with.

    By default these are the data where the settings say so, else drawn from the teacher while
    training. `options` are the method's own.
    """
    entry = METHODS[config.method]
    if student.config.masks > 1 and not entry.several_masks:
        raise UserError(
            f"The student has {student.config.masks} masks, which {config.method} does not know: "
            "use method=mixture, or another student."
        )
    source = config.reference.source if entry.texts == "reference" else entry.texts
    if references is None and source == "data" and data is not None:
        references = data.rows
    if references is None and source in ("bank", "data"):
        raise ValueError(f"references are needed for reference.source={source}")
    beginning: Any = teacher.network
    if config.lora.rank:
        origin = {"source": teacher.source, "fingerprint": teacher.fingerprint}
        beginning, student = (
            adapt(network, config.lora, seed=config.train.seed, **origin)
            for network in (beginning, student)
        )
    student, second = entry.networks(config, beginning, student)
    if config.lora.rank and shards(config.train, world):
        frozen: Any = teacher.network
        shard_frozen(frozen, world)
    distillation = Distillation(
        config, entry, teacher, student, world, data=data, references=references
    )
    return DistillTask(distillation, entry.make(distillation, second, **options))


def check_fit(
    config: DistillConfig, teacher: Network, *, rows: int | None = None, processes: int = 1
) -> None:
    """Refuse settings that do not fit a teacher, before anything is drawn from it.

    `rows` is the length of the data's rows, where there is data.
    """
    model, window = teacher.config, window_of(teacher)
    METHODS[config.method].check(config, model)
    if rows is not None and rows > model.length:
        raise UserError(
            f"The data has rows of {rows} tokens, but the teacher reads at most {model.length}: "
            f"prepare it with --length {model.length}."
        )
    length = window if rows is None else rows
    if model.end_id is not None and length != window:
        raise UserError(
            f"The data has rows of {rows} tokens, but the teacher's windows, one for each text, "
            f"have {window}: prepare it with --length {window}."
        )
    if not config.prompts.source and config.prompt >= length:
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
