"""What tests of the command line share."""

import sys

import pytest

from didi_instruct.cli.main import main


@pytest.fixture
def didi(monkeypatch, capsys):
    """Run `didi` in this process, in a wide terminal: exit code, standard output and error."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["didi", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run
