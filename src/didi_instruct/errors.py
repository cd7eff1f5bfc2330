"""The errors that people are meant to see: one line that names the remedy."""


class UserError(ValueError):
    """A mistake its maker can mend. The command line prints the message alone and exits with 2."""


class MissingExtraError(UserError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs an optional part: pip install "didi-instruct[{extra}]"')


class TrainingError(RuntimeError):
    """Training cannot go on (a NaN loss, say). The command line prints it and exits with 1."""


def first_line(error: BaseException) -> str:
    """What an error says first, to stand in a sentence of ours; its name if it says nothing."""
    said, *_ = str(error).strip().splitlines() or [""]
    return said.rstrip(".: ") or type(error).__name__
