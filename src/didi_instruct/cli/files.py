"""Files that a command is to write, checked before the work begins."""

from pathlib import Path

from didi_instruct.errors import UserError


def check_target(file: Path, flag: str = "--json") -> None:
    """Refuse what could not be written afterwards."""
    if str(file) == "-":
        raise UserError(f"{flag} -: give the name of a file; the terminal has the numbers anyway.")
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise UserError(f"{flag} {file}: give a file in a folder that exists.")
