"""Compiled functions, and warnings given once where torch cannot compile."""

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
Given = ParamSpec("Given")
Result = TypeVar("Result")
MIX_ORDER = "triton.mix_order_reduction"
MOST_VERSIONS = 64
"""Of one function, for all networks, shapes and gradient modes; torch gives up beyond its limit,
and one iteration of distillation takes the 8 that it has by default."""

remarks: list[str] = []
"""Warnings given so far, for benchmarks to repeat beside their numbers."""
_allowed: ContextVar[bool] = ContextVar("didi_fusing", default=False)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per process."""
    remarks.append(text)
    logging.getLogger("didi_instruct").warning(text)


def compiled(function: Function, *, dynamic: bool | None = None, graphs: bool = False) -> Function:
    """Compile a function; with `graphs` its kernels are launched together, gradients included.

    Inductor's "mix-order reduction" (since 2.10) sums rows and columns of a gradient in one kernel.
    Where successive layer norms are modulated by vectors that all rows share, as ours are, the
    vectors' gradients come out wrong (pytorch issue 193061), so it is turned off.
    """
    from torch import _dynamo, _inductor

    limits: Any = _dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_VERSIONS)
    options: dict[str, Any] = {MIX_ORDER: False} if MIX_ORDER in _inductor.list_options() else {}
    if graphs:
        options["triton.cudagraphs"] = True
    result: Any = torch.compile(function, dynamic=dynamic, options=options or None)
    return result


@contextmanager
def fusing(allowed: bool) -> Iterator[None]:
    """Allow `Fused` functions to be compiled within the context, or forbid it (the default)."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def fuses(tensor: Tensor) -> bool:
    """True if a function of a tensor would be compiled."""
    return tensor.is_cuda and _allowed.get()


class Fused(Generic[Given, Result]):
    """A function of tensors with any number of rows, compiled once, on a GPU within `fusing`.

    Elsewhere `plain` runs, by default the function itself; so it does for fewer than two rows,
    which would be compiled anew, and where torch fails to compile, with a warning.
    """

    def __init__(
        self,
        function: Callable[Given, Result],
        name: str,
        plain: Callable[Given, Result] | None = None,
    ) -> None:
        self.function, self.name, self.plain = function, name, plain or function
        self._compiled: Any = None
        self._refused = False

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
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
            warn_once(f"{self.name} cannot be compiled here, so it runs slower: {reason}")
            return self.plain(*args, **kwargs)
        return result
