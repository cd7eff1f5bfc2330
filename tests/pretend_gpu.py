"""A GPU that is not there: faults that only show on a GPU are found on a CPU.

Within `PretendGpu` all tensors stay in the host's memory, but each is said to be on the host or on
the GPU, as it would be. What a GPU refuses is noted in `mixed`: an operation on tensors of both.
What makes the host wait for it is noted in `waits`: a number that is read, a size that depends on
values, a copy from or to memory that is not pinned.

Not seen: backward passes, what C++ does on its own, and the inside of torch's Python functions,
which count as one operation each.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__format__", "__repr__", "__array__"}
SIZES = {"nonzero", "argwhere", "masked_select", "bincount", "unique", "unique_consecutive"}
"""Operations whose result has a size that only the GPU knows."""
MOVES = {"to", "cpu", "as_tensor"}
MAY_MIX = {"copy_", "__deepcopy__", "_has_compatible_shallow_copy_type"}
SAME_DEVICE = {"stack", "cat", "linear", "matmul", "gather", "index_add", "index_add_"}
"""Operations in which a 0-d tensor of the host is not taken for a number."""


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is said to be on the GPU."""
    return tensor.__dict__.get("on_gpu", False)


class PretendGpu(TorchFunctionMode):
    """Says where tensors are, and notes what a GPU refuses and what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.waits: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            return _attribute(func, name, *args)
        if name in MOVES and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._check(name, args, kwargs, tensors)
        there, pinned = _is_gpu(kwargs.get("device")), kwargs.pop("pin_memory", False)
        if there:
            kwargs["device"] = HOST
            if name in ("tensor", "as_tensor"):
                self.wait(f"{name}(device=GPU)")
        told = kwargs.get("device") is not None
        result = func(*args, **kwargs)
        inherited = tensors[:1] if name == "__deepcopy__" else tensors
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not any(each is one for one in tensors):
                each.__dict__["on_gpu"] = there if told else any(map(on_gpu, inherited))
                each.__dict__["pinned"] = pinned
        return result

    def wait(self, what: str) -> None:
        """Note that the host waits."""
        self.waits.append(f"{what} at {_place()}")

    def _moved(self, func, name, args, kwargs):
        """What `to` and the like give, in new memory if they cross the border."""
        source, there = args[0], _target(name, args, kwargs)
        plain = [HOST if _is_gpu(each) else each for each in args]
        named = {key: HOST if _is_gpu(each) else each for key, each in kwargs.items()}
        result = func(*plain, **named)
        if there != on_gpu(source):
            result = source.clone() if result is source else result
            queued = source.__dict__.get("pinned") and kwargs.get("non_blocking")
            if not (there and queued):
                self.wait(f"{name} {'GPU' if there else 'host'}")
        result.__dict__["on_gpu"] = there
        return result

    def _check(self, name, args, kwargs, tensors) -> None:
        """Note what an operation other than a move asks of a GPU."""
        if not any(map(on_gpu, tensors)):
            return
        if name in ("__getitem__", "__setitem__"):
            self._check_index(name, *args)
        elif name == "copy_":
            self._check_copy(*tensors, queued=kwargs.get("non_blocking", False))
        elif name not in MAY_MIX and _mixes(name, tensors):
            which = ", ".join(f"{_named(each)} {tuple(each.shape)}" for each in tensors)
            self.mixed.append(f"{name} of {which} at {_place()}")
        sizes = name in SIZES or (name == "where" and len(args) + len(kwargs) == 1)
        repeats = name == "repeat_interleave" and len(tensors) > 1 and "output_size" not in kwargs
        if (name in READS and on_gpu(tensors[0])) or sizes or repeats:
            self.wait(name)

    def _check_index(self, name, tensor, index, value=None) -> None:
        for each in tree_leaves(index):
            if not isinstance(each, Tensor):
                continue
            if on_gpu(each) and not on_gpu(tensor):
                self.mixed.append(f"{name} of the host by the GPU at {_place()}")
            elif on_gpu(each) and each.dtype == torch.bool:
                self.wait(f"{name} by a mask")
            elif on_gpu(tensor) and not on_gpu(each) and each.ndim:
                self.wait(f"{name} by an index of the host")
        if isinstance(value, Tensor) and value.ndim and on_gpu(value) != on_gpu(tensor):
            self.mixed.append(f"{name} of another device at {_place()}")

    def _check_copy(self, target, source, *, queued: bool) -> None:
        host = source if on_gpu(target) else target
        if on_gpu(target) != on_gpu(source) and not (queued and host.__dict__.get("pinned")):
            self.wait(f"copy_ {_named(source)} to {_named(target)}")


class _Event:
    """Of a stream in which all is done at once."""

    def __init__(self, gpu: PretendGpu) -> None:
        self.gpu = gpu

    def record_event(self) -> "_Event":
        return self

    def synchronize(self) -> None:
        self.gpu.wait("synchronize")


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A GPU within, and what torch asks of a real one until the test ends."""
    mode, make = PretendGpu(), Parameter.__new__
    group = clip_grad._group_tensors_by_device_and_dtype

    def made(cls, data=None, requires_grad=True):
        result = make(cls, data, requires_grad)
        result.__dict__["on_gpu"] = data is not None and on_gpu(data)
        return result

    def grouped(*lists):
        return {(GPU, dtype): found for (_, dtype), found in group(*lists).items()}

    monkeypatch.setattr(Parameter, "__new__", staticmethod(made))
    monkeypatch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", grouped)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: _Event(mode))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: mode.wait("synchronize"))
    with mode:
        yield mode


def _attribute(func, name, tensor, *value):
    """An attribute of a tensor, which is where the tensor is; or set it."""
    which = getattr(func.__self__, "__name__", "")
    if name == "__get__" and which in ("device", "is_cuda") and on_gpu(tensor):
        return GPU if which == "device" else True
    result = func(tensor, *value)
    if isinstance(result, Tensor):
        result.__dict__["on_gpu"] = on_gpu(tensor)
    if name == "__set__" and which == "data":
        tensor.__dict__["on_gpu"] = on_gpu(value[0])
    return result


def _is_gpu(device) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _named(tensor: Tensor) -> str:
    return "GPU" if on_gpu(tensor) else "host"


def _target(name, args, kwargs) -> bool:
    """Whether a move ends on the GPU."""
    if name == "cpu":
        return False
    for each in (*args[1:], *kwargs.values()):
        if isinstance(each, Tensor):
            return on_gpu(each)
        if isinstance(each, (str, torch.device)):
            return _is_gpu(each)
    return on_gpu(args[0])


def _mixes(name: str, tensors: list[Tensor]) -> bool:
    """Whether tensors of both devices meet; a 0-d tensor of the host may pass as a number."""
    if len({on_gpu(each) for each in tensors}) == 1:
        return False
    large = {on_gpu(each) for each in tensors if each.ndim}
    return len(large) == 2 or large == {False} or name in SAME_DEVICE


def _place() -> str:
    """Where the two innermost calls from outside of torch and this file are."""
    own = (str(Path(torch.__file__).parent), __file__)
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(own)]
    return " from ".join(
        f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno} {f.name}"
        for f in frames[:-3:-1]
    )
