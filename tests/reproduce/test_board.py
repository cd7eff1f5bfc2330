"""How a grid tells where it stands, on plain lines."""

import pytest

from didi_instruct.cli.board import ProgressBoard
from didi_instruct.reproduce.grid import Standing
from didi_instruct.reproduce.jobs import Job


@pytest.fixture
def board(capsys):
    """A board whose clock is set by hand, and what it has said since it was asked last."""
    now = {"time": 100.0}
    shown = ProgressBoard(clock=lambda: now["time"])

    def lines():
        return capsys.readouterr().err.splitlines()

    return shown, now, lines


def test_every_change_of_state_is_a_line_and_progress_only_now_and_then(board):
    shown, now, lines = board
    one = Standing(Job(name="one", does="m:f"))
    other = Standing(Job(name="other", does="m:g"))
    both = [one, other]
    one.state = "running"
    shown.show(both, one)
    for second in range(25):
        now["time"] += 1
        one.note = f"step {second}"
        shown.show(both, one)
    said = lines()
    assert len(said) == 3  # the start, and one line in every ten seconds
    assert said[0] == "2 jobs: 1 waiting | one running"
    assert said[1] == "2 jobs: 1 waiting | one running 0:00:10: step 9"
    one.state, one.note, one.seconds = "failed", "no luck", 26.0
    shown.show(both, one)
    other.state, other.note = "blocked", "needs one"
    shown.show(both, other)
    assert lines() == [
        "2 jobs: 1 failed, 1 waiting | one failed 0:00:26: no luck",
        "2 jobs: 1 failed, 1 blocked | other blocked: needs one",
    ]
