import os
import signal

import pytest

from didi_instruct.training import loop as module
from didi_instruct.training.loop import interruptible


def test_signals_are_a_wish_and_repeating_them_changes_nothing():
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda text: None) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


def test_a_later_ctrl_c_is_an_order(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    with interruptible(lambda text: None) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
