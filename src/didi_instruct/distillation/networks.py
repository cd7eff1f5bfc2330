"""Teacher and student of a distillation: loaded models that fit each other and the settings."""

import copy
from dataclasses import replace
from typing import cast

from didi_instruct.adapters.lora import shared
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import DATA_LENGTHS, ModelConfig, law_of_lengths
from didi_instruct.data.dataset import TokenSource
from didi_instruct.distillation.methods import METHODS
from didi_instruct.errors import Setting, UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.network import Network
from didi_instruct.training.run_data import with_lengths
from didi_instruct.training.run_dir import Run

KINDS = {"mdlm": "masked diffusion models", "duo": "uniform-state diffusion models"}


def prepare_teacher(loaded: LoadedModel, config: DistillConfig, source: str) -> Network:
    """The network of a teacher that the settings can distil, with the lengths that they name."""
    network, entry = _prepare(loaded, config, source), METHODS[config.method]
    masks, order = loaded.config.masks, loaded.config.order
    if masks > 1:
        raise UserError(
            f"{source}: the teacher has {masks} masks (mixture steps): distil what it was "
            "distilled from."
        )
    # A teacher that is never asked to write a text may know one order alone.
    if order != "random" and not (entry.any_order and not entry.texts):
        raise UserError(
            "{}: the teacher reveals positions in {}, as students do: distil what it was distilled "
            "from, and go on from it with {}.",
            source,
            order,
            Setting("student"),
        )
    if order not in (config.order, "random"):
        raise UserError(
            "order is {}, but {} reveals positions in {}: add {}.",
            config.order,
            source,
            order,
            Setting("order", order),
        )
    return network


def make_student(
    teacher: LoadedModel, source: str, other: LoadedModel | None, config: DistillConfig
) -> Network:
    """Make the student: a copy of the teacher, or of the model that the settings name."""
    start = cast("Network", teacher.model)
    if other is not None:
        assert config.student is not None
        start = _prepare(other, config, config.student)
        _check_pair(teacher, other, config, f"{config.student} (the student)", source)
    # Tensors of a loaded model are views of its file. Adapters leave them as they are.
    student = copy.deepcopy(start) if not config.lora.rank else shared(start)
    # How long texts are is the teacher's to say.
    student.config = replace(student.config, lengths=teacher.config.lengths, order=config.order)
    return student


def take_lengths(
    run: Run, data: TokenSource | None, teacher: LoadedModel, student: Network, source: str | None
) -> None:
    """Give teacher and student the law of the data's lengths, which `prepare_teacher` left open."""
    end_id = teacher.config.end_id
    if data is None or data.num_sequences is None or end_id is None:
        raise UserError(
            f"lengths={DATA_LENGTHS} counts texts, and data.source={source} has no end of them: "
            "name the lengths, 100-500 for example."
        )
    model = with_lengths(run, teacher.config, data, end_id)
    _set_config(teacher, model)
    student.config = replace(student.config, lengths=model.lengths)


def _prepare(loaded: LoadedModel, config: DistillConfig, source: str) -> Network:
    """The network of a model of the method's kind, with the law of lengths that the settings name.

    Those of the data are counted later (`take_lengths`): until then all lengths are alike. What a
    masked LM of transformers never writes is banned: where a text has it, it is given.
    """
    kind, found = METHODS[config.method].teacher_kind, loaded.config.kind
    if found != kind:
        raise UserError(
            f"{source} is a model of kind `{found}`: method={config.method} distils {KINDS[kind]} "
            f"(`{kind}`)."
        )
    if isinstance(loaded.model, MaskedLM) and not loaded.config.banned:
        _set_config(loaded, replace(loaded.config, banned=loaded.model.ids.banned))
    if config.lengths:
        end_id, longest = loaded.config.end_id, loaded.config.length
        if end_id is None:
            end_id = _closing_token(loaded, config, source)
            if loaded.tokenizer is not None:
                loaded.tokenizer = loaded.tokenizer.ending(end_id)
        named = f"1-{longest}" if config.lengths == DATA_LENGTHS else config.lengths
        lengths = law_of_lengths(named, longest)
        _set_config(loaded, replace(loaded.config, end_id=end_id, lengths=lengths))
    return cast("Network", loaded.model)


def _closing_token(loaded: LoadedModel, config: DistillConfig, source: str) -> int:
    """The special token that a masked LM reads behind a text: it ends texts and fills windows."""
    after = loaded.model.ids.after if isinstance(loaded.model, MaskedLM) else ()
    if not after:
        raise UserError(
            f"lengths is {config.lengths}, but texts of {source} fill their windows: leave it out, "
            "or use a teacher whose texts end (model.own_window)."
        )
    return after[0]


def _check_pair(
    teacher: LoadedModel, student: LoadedModel, config: DistillConfig, other: str, source: str
) -> None:
    """Refuse a student, named `other`, that does not fit its teacher."""
    one, two = teacher.config, student.config
    hashes = {m.tokenizer.hash if m.tokenizer else None for m in (teacher, student)}
    if len(hashes) > 1 or one.num_tokens != two.num_tokens:
        raise UserError(
            f"{other} and {source} (the teacher) have different tokenizers: distillation compares "
            "them token by token."
        )
    if one.schedule != two.schedule:
        raise UserError(
            f"{other} and {source} (the teacher) have different noise schedules: their times would "
            "not mean the same."
        )
    if two.length < one.length:
        raise UserError(f"{other} reads at most {two.length} tokens, the teacher {one.length}.")
    if one.end_id != two.end_id:
        windows = [
            "fill their windows" if end is None else f"end with token {end} in windows of their own"
            for end in (two.end_id, one.end_id)
        ]
        raise UserError(
            f"Texts of {other} {windows[0]}, those of {source} (the teacher) {windows[1]}: use a "
            "student that was made from such texts, or none."
        )
    if one.end_id is not None and two.length != one.length:
        raise UserError(
            f"{other} has windows of {two.length} tokens, {source} (the teacher) of {one.length}: "
            "where each text has its own they must be alike."
        )
    several = METHODS[config.method].several_masks and two.masks <= config.mixture.codes
    if two.masks > 1 and not several:
        raise UserError(
            f"{other} has {two.masks} masks: use method=mixture with mixture.codes {two.masks} or "
            "more, or another student."
        )


def _set_config(loaded: LoadedModel, config: ModelConfig) -> None:
    loaded.config = loaded.model.config = config  # type: ignore[assignment]
