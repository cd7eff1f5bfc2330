"""Rows, and columns of probability 0, that a GPU is given, on a CPU: what is learnt is the same."""

import pytest
import torch

from didi_instruct.distillation import hosting
from didi_instruct.distillation import task as tasks

from . import (
    test_didi_step,
    test_dimo,
    test_duo,
    test_mixture,
    test_sdtt,
    test_token_matching_step,
)

MAKERS = {
    "didi": lambda: test_didi_step.task_of(),
    "token-matching": lambda: test_token_matching_step.task_of({"anchor": 0.3, "ratio_clip": 0.1}),
    "dimo": lambda: test_dimo.task_of(),
    "mixture": lambda: test_mixture.task_of(),
    "sdtt": lambda: test_sdtt.task_of({"divergence": "mse"}),
    "duo": lambda: test_duo.make_task(),
}
COUNTS_COLUMNS = ("sdtt", "duo")


@pytest.mark.parametrize("method", MAKERS)
def test_padding_changes_nothing(method, monkeypatch):
    plain = MAKERS[method]()
    expected = [plain.step(step) for step in range(3)]
    monkeypatch.setattr(hosting, "ROWS", 7)
    for module in (tasks, hosting):
        monkeypatch.setattr(module, "pays_to_pad", lambda device: True)
    padded = MAKERS[method]()
    own = padded.student.network.align
    assert own == (1 if method in COUNTS_COLUMNS else tasks.ALIGN)
    for step, theirs in enumerate(expected):
        ours = padded.step(step)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name, rtol=1e-4, atol=1e-6)
    one, other = (task.student.network.state_dict() for task in (padded, plain))
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, msg=name, rtol=1e-3, atol=1e-5)
