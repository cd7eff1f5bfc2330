import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices: a second thread costs more than it brings, ten times so on a busy machine."""
    torch.set_num_threads(1)
