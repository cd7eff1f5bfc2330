"""To a GPU and back without waiting for what it still has to do."""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; what comes from the host is only queued."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor).to(device, non_blocking=True)
    return tensor.to(device)


class Later:
    """A number that is read later: what is queued in the meantime is not waited for."""

    def __init__(self, number: Tensor) -> None:
        """Ask for a 0-d tensor."""
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> float:
        """Wait for it, if it is not here yet."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)
