"""Reading a torch checkpoint without running it: tensors and plain containers, nothing else.

A pickle is a program; `pickle.load` runs it, and a program can do anything. Here its opcodes are
read by a machine that can build containers and describe tensors, and that has no way to import or
to call anything: what names a class or a function becomes an `Inert` note of that name, and what
would have called it becomes another. So the hyper-parameters, loops and callbacks that Lightning
leaves in its files do nothing, and neither does anything worse.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from didi_instruct.errors import UserError
from didi_instruct.models.foreign.archive import Archive
from didi_instruct.models.foreign.stored import (
    CALLS,
    MAX_TEXT,
    Inert,
    RefusedError,
    cheap_key,
    storage_of,
)

MAX_OPCODES = 5_000_000
"""Steps of a pickle: a checkpoint with a slow tokenizer in it needs about a million.

Opcodes, and the members of a list that becomes a dictionary or a set: a pickle can ask for that as
often as it likes.
"""


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a torch file."""

    archive: Archive
    content: Any
    """Containers, numbers, text, `StoredTensor` and `Inert`."""
    untouched: tuple[str, ...]
    """Names of the classes and functions that a call was asked of and that were not run."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the structure of a `.ckpt`, `.pt` or `.bin` file; no tensor is read yet."""
    archive = Archive(path)
    machine = _Machine({key: extent.size for key, extent in archive.storages.items()})
    try:
        content = machine.run(archive.pickle())
    except RefusedError as error:
        raise UserError(f"{path} is refused: {error}. Get it from a source you trust.") from error
    return Checkpoint(archive, content, tuple(sorted(str(i) for i in machine.untouched.values())))


class _Machine:
    """The stack machine of pickles, without the opcodes' powers.

    Containers hold references, so what a pickle repeats costs nothing here, and nothing is ever
    walked through but the paths to tensors.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.steps = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """Stacks that marks have put aside."""
        self.memo: dict[int, Any] = {}
        self.untouched: dict[tuple[str, str], Inert] = {}

    def run(self, data: bytes) -> Any:
        """Follow the opcodes; return what the last one leaves."""
        try:
            for opcode, argument, _ in pickletools.genops(data):
                self.spend(1)
                if opcode.name == "STOP":
                    return self.stack.pop()
                self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise RefusedError(f"its pickle is damaged ({type(error).__name__})") from error
        raise RefusedError("its pickle has no end")

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_OPCODES:
            raise RefusedError(f"its pickle has more than {MAX_OPCODES} steps")

    def _step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise RefusedError(f"its pickle uses {name}, which torch.save never writes")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def last(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError
        del self.stack[-count:]
        return items

    def discard(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(cheap_key(item) for item in items)
        elif not isinstance(target, Inert):
            raise TypeError

    def assign(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(_pairs(items))
        elif not isinstance(target, Inert):
            raise TypeError

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        self.stack.append(Inert(module[:MAX_TEXT], name[:MAX_TEXT]))  # compared at every use

    def call(self, function: Any, arguments: Any) -> None:
        """Push what a call would have made: a tensor, a container, or a note."""
        if not isinstance(function, Inert):
            raise TypeError
        known = None if function.called else CALLS.get((function.module, function.name))
        if known is not None and isinstance(arguments, tuple):
            if arguments and isinstance(arguments[0], list):
                self.spend(len(arguments[0]))
            self.stack.append(known(function, arguments))
            return
        self.untouched.setdefault((function.module, function.name), function)
        self.stack.append(function.result())

    def reduce(self) -> None:
        function, arguments = self.last(2)
        self.call(function, arguments)

    def instance(self, items: list[Any]) -> None:
        """NEWOBJ and its kin make instances of a class: none is known here."""
        self.call(items[0], None)

    def old_instance(self, name: str) -> None:
        self.since_mark()
        self.name(*name.split(" ", 1))
        self.instance(self.last(1))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {cheap_key(k): value for k, value in zip(items[::2], items[1::2], strict=True)}


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""Opcodes whose argument is the value."""

_FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
"""Opcodes that push a value of their own."""

_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.discard(),
    "POP_MARK": lambda m, _: m.since_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "PUT": _Machine.remember,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    "GET": _Machine.recall,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "LIST": lambda m, _: m.push(m.since_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.last(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.last(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.last(3))),
    "DICT": lambda m, _: m.push(_pairs(m.since_mark())),
    "FROZENSET": lambda m, _: m.push(frozenset(map(cheap_key, m.since_mark()))),
    "APPEND": lambda m, _: m.extend(m.last(1)),
    "APPENDS": lambda m, _: m.extend(m.since_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.since_mark()),
    "SETITEM": lambda m, _: m.assign(m.last(2)),
    "SETITEMS": lambda m, _: m.assign(m.since_mark()),
    "GLOBAL": lambda m, name: m.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.last(2)),
    "REDUCE": lambda m, _: m.reduce(),
    "NEWOBJ": lambda m, _: m.instance(m.last(2)),
    "NEWOBJ_EX": lambda m, _: m.instance(m.last(3)),
    "INST": _Machine.old_instance,
    "OBJ": lambda m, _: m.instance(m.since_mark()),
    "BUILD": lambda m, _: m.last(1),  # what a state would have been given to stays as it is
    "BINPERSID": lambda m, _: m.push(storage_of(m.last(1)[0], m.sizes)),
}
"""All other opcodes that torch writes. Text ids, extensions and buffers it does not write."""
