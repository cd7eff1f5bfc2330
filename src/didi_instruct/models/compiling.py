"""torch.compile, kept from doing what it does wrongly."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
WRONG = "triton.mix_order_reduction"
MOST_VERSIONS = 64
"""Of one function, for all networks, shapes and gradient modes; beyond it torch no longer compiles,
and its own 8 are what one iteration of distillation takes."""


def compiled(function: Function, *, dynamic: bool | None = None, graphs: bool = False) -> Function:
    """Compile a function; with `graphs` its kernels are launched together, gradients included.

    Since 2.10 inductor sums rows and columns of a gradient in one kernel ("mix-order reduction").
    Where layer norms one after the other are modulated by vectors that all rows share, as ours
    are, the vectors' gradients come out as garbage (pytorch issue 193061), so it is turned off.
    """
    from torch import _dynamo, _inductor

    limits: Any = _dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_VERSIONS)
    options: dict[str, Any] = {WRONG: False} if WRONG in _inductor.list_options() else {}
    if graphs:
        options["triton.cudagraphs"] = True
    result: Any = torch.compile(function, dynamic=dynamic, options=options or None)
    return result  # type: ignore[no-any-return]
