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
    """Numbers that are read later: what is queued in the meantime is not waited for."""

    def __init__(self, *numbers: Tensor) -> None:
        """Ask for 0-d tensors of one type."""
        self._event: torch.cuda.Event | None = None
        self._numbers = torch.stack(numbers)
        if self._numbers.is_cuda:
            asked = self._numbers
            self._numbers = torch.empty(asked.shape, dtype=asked.dtype, pin_memory=True)
            self._numbers.copy_(asked, non_blocking=True)
            self._event = torch.cuda.current_stream(asked.device).record_event()

    def read(self) -> list[float]:
        """Wait for them, if they are not here yet."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._numbers.tolist()]
