"""How a training command ends before its summary."""

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from didi_instruct.training.loop import Outcome


def leave_unless_done(outcome: "Outcome", is_main: bool) -> None:
    """Exit if a signal stopped the run, or if another process tells the rest."""
    # Not typer.Exit: its 130 is what Ctrl-C looks like where nothing was saved.
    code = 0 if outcome.signal is None else 128 + outcome.signal
    if not is_main:
        sys.exit(code)
    if outcome.signal is not None:
        typer.echo(
            f"Stopped at step {outcome.step}; saved {outcome.checkpoint}. Go on with --resume."
        )
        sys.exit(code)
