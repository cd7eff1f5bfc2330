"""Distil masked diffusion language models into few-step generators."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "distill", "load", "pretrain"]

if TYPE_CHECKING:
    from didi_instruct.api.distill import distill
    from didi_instruct.api.model import Model, load
    from didi_instruct.api.pretrain import pretrain

_HOMES = {
    "Model": "didi_instruct.api.model",
    "load": "didi_instruct.api.model",
    "distill": "didi_instruct.api.distill",
    "pretrain": "didi_instruct.api.pretrain",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `didi --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
