"""A file of weights as names, shapes and types, whatever its format; tensors come on demand."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.pickles import Checkpoint, read_checkpoint
from didi_instruct.models.foreign.stored import REPEATED, Inert, StoredTensor
from didi_instruct.models.tensor_files import DTYPES, read_tensors, shown

SHADOW = "ema.shadow_params."
"""Before the number of each averaged weight of a Lightning checkpoint: it keeps a list."""

SPARE = 64
"""Averages that may have no tensor of their own: those of a noise schedule, say."""

_POINTER = b"version https://git-lfs.github.com/"

_FLOATS = {*DTYPES.values(), *DTYPES}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """Header of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: str | torch.dtype

    @property
    def is_weight(self) -> bool:
        """True if its type is one that weights have."""
        return self.dtype in _FLOATS

    @property
    def itemsize(self) -> int:
        """Bytes of a number, of a weight."""
        kind = self.dtype if isinstance(self.dtype, torch.dtype) else _BY_NAME[self.dtype]
        return kind.itemsize


class Store(Protocol):
    """A file of weights."""

    path: Path
    headers: dict[str, Header]
    """Every tensor, in the file's order."""
    blocked: dict[str, str]
    """Names whose values are no tensors, and what they are."""
    untouched: tuple[str, ...]
    """Pickled classes and functions that were not run."""
    is_training: bool
    """Whether this is the whole state of a training run, with weights among other things."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors on the CPU, memory-mapped."""


def open_store(path: Path) -> Store:
    """Read the headers of a `.safetensors` file, or of any file that `torch.save` wrote."""
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    _refuse_pointer(path)
    return SafetensorsStore(path) if path.suffix == ".safetensors" else PickleStore(path)


def _refuse_pointer(path: Path) -> None:
    """Refuse what git leaves in place of a large file."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_POINTER))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if head == _POINTER:
        raise UserError(
            f"{path} is a pointer of git-lfs, not the weights: run `git lfs pull` in its folder."
        )


@dataclass
class SafetensorsStore:
    """A safetensors file."""

    path: Path
    headers: dict[str, Header] = field(init=False, default_factory=dict)
    blocked: dict[str, str] = field(init=False, default_factory=dict)
    untouched: tuple[str, ...] = ()
    is_training: bool = False

    def __post_init__(self) -> None:
        """Read the header."""
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a method of the file, not of a dict)
                    part = file.get_slice(name)
                    self.headers[name] = Header(tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path} is not a readable safetensors file: {shown(str(error), 200)}. "
                "Fetch it again."
            ) from error

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors on the CPU, memory-mapped."""
        return read_tensors(self.path, {name: self.headers[name].shape for name in names})


class PickleStore:
    """A torch file: a state dict, or a training run's state with one under `state_dict`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        checkpoint: Checkpoint = read_checkpoint(path)
        self._archive, self.untouched = checkpoint.archive, checkpoint.untouched
        content = checkpoint.content
        if not isinstance(content, dict):
            raise UserError(f"{path} holds {_what(content)}, not named weights: save a state dict.")
        state = content.get("state_dict", content)
        if not isinstance(state, dict):
            raise UserError(f"{path}: its `state_dict` is {_what(state)}, which is not run.")
        self.is_training = state is not content
        named = {k: v for k, v in state.items() if isinstance(k, str)}
        self._tensors = {k: v for k, v in named.items() if isinstance(v, StoredTensor)}
        self.blocked = {k: _what(v) for k, v in named.items() if isinstance(v, Inert)}
        self._add_averages(content.get("ema") if self.is_training else None)
        self.headers = {k: Header(t.shape, t.dtype) for k, t in self._tensors.items()}

    def _add_averages(self, ema: Any) -> None:
        shadows = ema.get("shadow_params") if isinstance(ema, dict) else None
        if not isinstance(shadows, list):
            return
        known = len(self._tensors) + len(self.blocked)
        if len(shadows) > known + SPARE:
            raise UserError(
                f"{self.path}: `ema.shadow_params` has {len(shadows)} entries for {known} weights: "
                "it is damaged, fetch it again."
            )
        for number, shadow in enumerate(shadows):
            if isinstance(shadow, StoredTensor):
                self._tensors[f"{SHADOW}{number}"] = shadow
            else:
                self.blocked[f"{SHADOW}{number}"] = _what(shadow)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors on the CPU, memory-mapped."""
        for name in names:
            yield name, self._tensors[name].read(self._archive)


def _what(value: Any) -> str:
    if value is REPEATED:
        return "a view that repeats its numbers (`torch.Tensor.expand`)"
    return f"an object of `{value}`" if isinstance(value, Inert) else f"a {type(value).__name__}"
