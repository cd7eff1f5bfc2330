"""torch.compile, kept from doing what it does wrongly."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
WRONG = "triton.mix_order_reduction"


def compiled(function: Function, *, dynamic: bool | None = None) -> Function:
    """Compile a function.

    Since 2.10 inductor sums rows and columns of a gradient in one kernel ("mix-order reduction").
    Where layer norms one after the other are modulated by vectors that all rows share, as ours
    are, the vectors' gradients come out as garbage (pytorch issue 193061), so it is turned off.
    """
    from torch import _inductor

    options: dict[str, Any] = {WRONG: False} if WRONG in _inductor.list_options() else {}
    result: Any = torch.compile(function, dynamic=dynamic, options=options or None)
    return result  # type: ignore[no-any-return]
