import sys

import pytest
import torch

from didi_instruct.cli.main import main


def pytest_collection_modifyitems(items):
    """Tests that need a GPU are skipped, and say why, where torch sees none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices: a second thread costs more than it brings, ten times so on a busy machine."""
    torch.set_num_threads(1)


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
