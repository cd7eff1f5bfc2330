"""Our models in the layouts of public checkpoints: weights, config.json and tokenizer.

The numbers are ours, bit by bit. Where a layout cannot say what a model is, the model is refused
before anything is written. (The noise schedule is not among that: the networks see σ, not t.)
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.files import (
    no_space_as_user_error,
    require_space,
    write_atomic,
)
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import CONFIG, DISCRIMINATOR, MODEL, LoadedModel
from didi_instruct.models.foreign.folders import new_folder, refuse_full
from didi_instruct.models.foreign.special_ids import reopen_padding
from didi_instruct.models.tensor_files import save_tensors

Writable = Literal["mdlm-hub", "duo-hub", "sdtt-hub", "didi-instruct"]

LEAVE_OUT = "write without it (discriminator=False)"

_PREFIX = {"didi-instruct": ""}
"""Before the core keys; `backbone.` elsewhere."""


def write_foreign(
    loaded: LoadedModel, folder: str | Path, layout: Writable, discriminator: bool = True
) -> Path:
    """Write a model in another layout, to a folder that does not exist yet or is empty.

    `discriminator=False` leaves one out where the layout has no place for it.
    """
    folder = Path(folder)
    critic = loaded.discriminator if discriminator else None
    _refuse(loaded, layout, critic)
    refuse_full(folder)
    tensors = _state(loaded.model)
    padding = reopen_padding(tensors, loaded.provenance) if loaded.config.kind == "duo" else None
    prefix = _PREFIX.get(layout, "backbone.")
    files = {MODEL: {prefix + name: t for name, t in tensors.items()}}
    if critic is not None:
        files[DISCRIMINATOR] = _state(critic)
    settings = _settings(loaded.config, layout, padding)
    with no_space_as_user_error(folder):
        require_space(folder, sum(t.nbytes for part in files.values() for t in part.values()))
        _write(folder, files, settings, loaded)
    return folder


def _refuse(loaded: LoadedModel, layout: str, critic: nn.Module | None) -> None:
    """Refuse what the layout has no words for."""
    config = loaded.config
    if layout not in get_args(Writable):
        known = ", ".join(get_args(Writable))
        raise UserError(f"`{layout}` is no layout to write. Known: {known}.")
    kind = "duo" if layout == "duo-hub" else "mdlm"
    if config.kind != kind:
        raise UserError(f"`{layout}` holds `{kind}` models, and this is `{config.kind}`.")
    if config.learned_positions:
        raise UserError(
            f"`{layout}` has rotary positions alone, no `learned_positions`: train with "
            "--set model.learned_positions=false, or write --to didi."
        )
    if config.masks > 1:
        raise UserError(f"`{layout}` has one mask, and the model {config.masks} (mixture steps).")
    if config.end_id is not None or config.order != "random":
        name = "order" if config.end_id is None else "end_id"
        raise UserError(f"`{layout}` has no words for `{name}: {getattr(config, name)}`.")
    if layout == "duo-hub" and not config.time_conditioning:
        raise UserError("`duo-hub` models see the time, and this has `time_conditioning: false`.")
    if critic is None:
        return
    if layout != "didi-instruct":
        raise UserError(f"`{layout}` has no place for a discriminator: {LEAVE_OUT}.")
    trunk: Any = critic.config
    if trunk.learned_positions or trunk.time_conditioning != config.time_conditioning:
        raise UserError(
            "`didi-instruct` has no settings of its own for a discriminator, whose "
            f"`time_conditioning` or `learned_positions` differ from the model's: {LEAVE_OUT}."
        )


def _state(network: nn.Module) -> dict[str, Tensor]:
    network = getattr(network, "_orig_mod", network)
    return {name: t.detach() for name, t in network.state_dict().items()}


def _settings(config: ModelConfig, layout: Writable, padding: int | None) -> dict[str, Any]:
    """Return config.json with the names that the layout's own code reads."""
    shape = {
        "cond_dim": config.cond_dim,
        "n_blocks": config.layers,
        "n_heads": config.heads,
        "dropout": config.dropout,
    }
    if layout == "sdtt-hub":
        model = {"hidden_size": config.hidden, "length": config.length, **shape}
        return {"model": model, "time_conditioning": config.time_conditioning}
    settings = {
        "model_type": {"duo-hub": "DUO", "mdlm-hub": "mdlm"}.get(layout, layout),
        "vocab_size": config.vocab_size,
        "model_length": config.length,
        "hidden_dim": config.hidden,
        **shape,
    }
    if layout == "duo-hub":
        return {**settings, "causal": False, "pad_token_id": padding}
    return {**settings, "time_conditioning": config.time_conditioning}


def _write(
    folder: Path,
    files: dict[str, dict[str, Tensor]],
    settings: dict[str, Any],
    loaded: LoadedModel,
) -> None:
    with new_folder(folder) as hidden:
        for name, tensors in files.items():
            save_tensors(hidden / name, tensors)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(hidden)
        write_atomic(hidden / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())
