import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Networks this small lose more by waiting for a second, busy core than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
