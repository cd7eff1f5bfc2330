import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def fast_disk() -> Iterator[None]:
    """Waiting for the disk proves nothing here, and takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
