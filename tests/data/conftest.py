import os

import pytest


@pytest.fixture
def fast_disk(monkeypatch) -> None:
    """Waiting for the disk proves nothing here, and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
