"""Distil masked diffusion language models into few-step generators."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "EvalConfig",
    "Model",
    "__version__",
    "distill",
    "evaluate",
    "finetune",
    "load",
    "pretrain",
]

if TYPE_CHECKING:
    from didi_instruct.distill import distill
    from didi_instruct.evaluation.evaluate import EvalConfig, evaluate
    from didi_instruct.finetune import finetune
    from didi_instruct.model import Model, load
    from didi_instruct.pretrain import pretrain

_HOMES = {
    "EvalConfig": "didi_instruct.evaluation.config",
    "Model": "didi_instruct.model",
    "load": "didi_instruct.model",
    "distill": "didi_instruct.distill",
    "evaluate": "didi_instruct.evaluation.evaluate",
    "finetune": "didi_instruct.finetune",
    "pretrain": "didi_instruct.pretrain",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `didi --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


class _Package(ModuleType):
    """The package, where a function stands before the module of its own that has its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing didi_instruct.finetune would put the module in the function's place.
        if isinstance(value, ModuleType) and _HOMES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
