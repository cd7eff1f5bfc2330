"""The errors that people are meant to see: one line that names the remedy."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function, named in an error; the command line has a flag for it."""

    name: str
    value: object = None
    """A value to give it, if the error advises one."""

    def __str__(self) -> str:
        return f"`{self.name}`" if self.value is None else f"`{self.name}={self.value}`"


class Setting(Argument):
    """A setting of a recipe, named in an error; the command line changes it with --set."""


class UserError(ValueError):
    """A mistake its maker can mend. The command line prints the message alone and exits with 2.

    Parts are put into the message as by `str.format`. An `Argument` or another `UserError` among
    them can still be worded otherwise (`reworded`).
    """

    def __init__(self, message: str, *parts: object) -> None:
        super().__init__(message.format(*parts) if parts else message)
        self.message, self.parts = message, parts

    def reworded(self, words: Callable[[Argument], object]) -> "UserError":
        """Return the error with `words(argument)` in place of each argument that it names."""

        def part(found: object) -> object:
            if isinstance(found, UserError):
                return found.reworded(words)
            return words(found) if isinstance(found, Argument) else found

        return UserError(self.message, *map(part, self.parts))


class MissingExtraError(UserError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs an optional part: pip install "didi-instruct[{extra}]"')


class TrainingError(RuntimeError):
    """Training cannot go on (a NaN loss, say). The command line prints it and exits with 1."""


def first_line(error: BaseException) -> str:
    """First line of an error, to stand in a sentence of ours; its name if it says nothing."""
    said, *_ = str(error).strip().splitlines() or [""]
    return said.rstrip(".: ") or type(error).__name__
