"""A stand-in for CUDA graphs on a CPU."""

import torch


class Buffered:
    """What a CUDA graph is, on a CPU: buffers of one shape, and a result that is overwritten."""

    def __init__(self, function, inputs, pool=None, dynamic=(), faster=None):
        self.function = function
        with torch.inference_mode(False), torch.no_grad():  # as graphs have them
            self.buffers = tuple(tensor.clone() for tensor in inputs)
            self.output = function(*self.buffers).clone()

    def __call__(self, *values):
        for buffer, value in zip(self.buffers, values, strict=bool(values)):
            buffer[: len(value)].copy_(value)
        self.output.copy_(self.function(*self.buffers))
        return self.output[: len(values[0])] if values else self.output
