"""The devices that a test of both runs on."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where there is no GPU, `conftest.py` skips the second."""
