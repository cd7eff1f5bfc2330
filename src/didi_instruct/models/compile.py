"""Compiled functions, and warnings said once where torch cannot compile."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from didi_instruct.errors import first_line

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


remarks: list[str] = []
"""What was said so far: who measures has to repeat it beside the numbers."""


@functools.cache
def warn_once(text: str) -> None:
    """Tell the user something that need not be told again."""
    remarks.append(text)
    logging.getLogger("didi_instruct").warning(text)


Given = ParamSpec("Given")
Result = TypeVar("Result")


_allowed: ContextVar[bool] = ContextVar("didi_fusing", default=False)


@contextmanager
def fusing(allowed: bool) -> Iterator[None]:
    """Within, functions are compiled if that is `allowed`; elsewhere nothing is."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def fuses(tensor: Tensor) -> bool:
    """Whether a function of a tensor would be compiled."""
    return tensor.is_cuda and _allowed.get()


class Fused(Generic[Given, Result]):
    """A function of tensors with rows, any number of them, compiled once where torch can.

    That is on a GPU, within `fusing`. Elsewhere `plain` runs, by default the function as it is
    written; so it does for fewer than two rows, which would be compiled anew, and where torch
    fails, of which the user is told once.
    """

    def __init__(
        self,
        function: Callable[Given, Result],
        what: str,
        plain: Callable[Given, Result] | None = None,
    ) -> None:
        self.function, self.what, self.plain = function, what, plain or function
        self._compiled: Any = None
        self._refused = False

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Call it."""
        if torch.compiler.is_compiling():  # within another function, and so with it
            return self.function(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor) and a.ndim]
        fits = all(len(t) > 1 and fuses(t) for t in tensors)
        if self._refused or not fits:
            return self.plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = compiled(self.function)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            result: Result = self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises
            self._refused, reason = True, first_line(error)
            warn_once(f"{self.what} cannot be compiled here, so it runs slower: {reason}")
            return self.plain(*args, **kwargs)
        return result
