"""Small networks whose weights all matter, in float64, and a stand-in for CUDA graphs on a CPU."""

import weakref
from typing import ClassVar

import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Reads

SCHEDULE = make_schedule(ScheduleConfig(eps=1e-3))
KINDS = {
    "plain": {},
    "timed": {"time_conditioning": True},
    "positions": {"learned_positions": True},
    "windows": {"end_id": 3, "lengths": (0, *[1] * 16)},
    "codes": {"masks": 4},
}


def make(device="cpu", dtype=torch.float64, seed=0, **changes):
    shape = {"layers": 2, "hidden": 32, "heads": 2, "cond_dim": 8, "vocab_size": 70, "length": 16}
    config = ModelConfig(**(shape | changes), schedule=ScheduleConfig(eps=1e-3))
    return randomise(DiT(config), seed).to(device, dtype).eval()


def questions(network, rows, length=16, seed=0):
    """Texts, a time of each, some of their positions in any order, and a number for each."""
    generator = torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    tokens = torch.randint(network.config.vocab_size, (rows, length), generator=generator)
    t = torch.rand(rows, generator=generator)
    at = torch.randperm(rows * length, generator=generator)[: max(1, rows * length // 3)]
    u = torch.rand(len(at), generator=generator, dtype=torch.float64)
    return Reads(tokens.to(device)), t.to(device), at.to(device), u.to(device)


def step_of(t, at, u, row=None):
    """The step that draws at some positions."""
    return Step(0, 0.0, t, None, at, at, u, row)


class Buffered:
    """Stand-in for a CUDA graph on a CPU: buffers of one shape, and a result that is overwritten.

    Graphs share their working memory, so a run also spoils the results of all others.
    """

    pool = None
    made: ClassVar = weakref.WeakSet()

    def __init__(self, function, inputs, pool=None, dynamic=False):
        self.function = function
        with torch.inference_mode(False), torch.no_grad():  # as graphs have them
            self.buffers = tuple(tensor.clone() for tensor in inputs)
            for buffer in self.buffers if dynamic else ():
                torch._dynamo.maybe_mark_dynamic(buffer, 0)
            self.output = function(*self.buffers).clone()
        self.made.add(self)

    def __call__(self, *values):
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer[: len(value)].copy_(value)
        for graph in self.made:
            graph.output.fill_(torch.nan)
        self.output.copy_(self.function(*self.buffers))
        return self.output[: len(values[0])]


def uncompiled(function, dynamic=None):
    """In place of `compiled`: compiling takes most of the time, and a few tests do it."""
    return function
