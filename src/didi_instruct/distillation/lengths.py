"""Texts of a distillation: how long they are, how they end, and what is never drawn in them."""

from dataclasses import replace

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import DATA_LENGTHS, ModelConfig, law_of_lengths
from didi_instruct.data.dataset import TokenSource
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.models.network import Network
from didi_instruct.training.run_data import with_lengths


def give_lengths(loaded: LoadedModel, config: DistillConfig, source: str) -> LoadedModel:
    """A model with the law of lengths that the settings name, if any; it is set in place.

    Those of the data are counted later (`take_lengths`): until then all lengths are alike. What a
    masked LM of transformers never writes is banned: where a text has it, it is given.
    """
    if isinstance(loaded.model, MaskedLM) and not loaded.config.banned:
        _set(loaded, replace(loaded.config, banned=loaded.model.ids.banned))
    if not config.lengths:
        return loaded
    model = loaded.config
    end_id = model.end_id
    if end_id is None:
        end_id = _closing_token(loaded, config, source)
        if loaded.tokenizer is not None:
            loaded.tokenizer = loaded.tokenizer.ending(end_id)
    named = f"1-{model.length}" if config.lengths == DATA_LENGTHS else config.lengths
    law = law_of_lengths(named, model.length)
    _set(loaded, replace(model, end_id=end_id, lengths=law))
    return loaded


def _closing_token(loaded: LoadedModel, config: DistillConfig, source: str) -> int:
    """The special token that a masked LM reads behind a text: it ends texts and fills windows."""
    after = loaded.model.ids.after if isinstance(loaded.model, MaskedLM) else ()
    if not after:
        raise UserError(
            f"lengths is {config.lengths}, but texts of {source} fill their windows: leave it out, "
            "or use a teacher whose texts end (model.own_window)."
        )
    return after[0]


def take_lengths(
    data: TokenSource | None, config: DistillConfig, teacher: LoadedModel, student: Network
) -> None:
    """Give teacher and student the law of the data's lengths where the settings ask for it."""
    if config.lengths != DATA_LENGTHS:
        return
    end_id = teacher.config.end_id
    if data is None or data.num_sequences is None or end_id is None:
        raise UserError(
            f"lengths={DATA_LENGTHS} counts texts, and data.source={config.data.source} has no end "
            "of them: name the lengths, 100-500 for example."
        )
    model = with_lengths(teacher.config, data, end_id)
    _set(teacher, model)
    student.config = replace(student.config, lengths=model.lengths)


def _set(loaded: LoadedModel, config: ModelConfig) -> None:
    loaded.config = loaded.model.config = config  # type: ignore[assignment]
