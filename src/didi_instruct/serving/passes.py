"""Forward passes of several requests as one.

Each request runs the sampler that `Model.generate` runs, in a greenlet of its own. Its denoiser is
a `SharedDenoiser`: wherever the sampler asks for a pass, the greenlet pauses and hands the pass to
the worker, which runs it together with those of others. So every sampler joins, and none knows.

Texts of one length are put side by side, and every row of a pass is computed from itself. By the
packed layout (`sampling.engines.cpu`) the results are those of the pass alone, bit for bit. For
networks as they are torch multiplies fewer than four rows by another kernel (float32, CPU), so
there results differ by rounding, and tokens are the same. Padding to a common length would add up
attention in another order, and measured no faster: other lengths take passes of their own.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import greenlet
import torch
from torch import Tensor

from didi_instruct.models.compile import fusing
from didi_instruct.sampling.denoiser import Denoiser, times_of
from didi_instruct.sampling.draw import PLAIN, DrawOptions, draw_tokens
from didi_instruct.sampling.plan import Step
from didi_instruct.sampling.state import Reads

Drawn = Tensor | tuple[Tensor, Tensor]
"""Logits (R, V), or tokens and log-probabilities (N,)."""
LOGITS_AT_ONCE = 1 << 28
"""Entries of the logits that one pass computes, if it is more than one request's."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One evaluation of a denoiser that a request waits for."""

    reads: Reads
    t: Tensor | float
    at: Tensor  # (R,) flat positions whose logits are needed
    step: Step | None = None  # what is drawn from them; None: the logits are wanted
    options: DrawOptions | None = None

    @property
    def shape(self) -> tuple[int, bool]:
        """Passes of one shape can be run as one: the length, and whether there is padding."""
        return self.reads.tokens.shape[1], self.reads.attended is not None

    @property
    def positions(self) -> int:
        """Positions of the canvases that are read."""
        return self.reads.tokens.numel()

    @property
    def draws_plainly(self) -> bool:
        """True if tokens are wanted, of the denoiser's own law."""
        return self.options is not None and not self.options.restricted

    def finish(self, logits: Tensor, *, compiled: bool = False) -> Drawn:
        """Return what is wanted, from logits (R, V)."""
        if self.step is None or self.options is None:
            return logits
        with fusing(compiled):
            return draw_tokens(logits, self.step.u, self.step.row, self.options)

    def of_texts(self, start: int, stop: int) -> tuple["Pass", Tensor]:
        """Logits of some texts alone, and which of the R rows those are: (R,) true or false."""
        length = self.reads.tokens.shape[1]
        own = (self.at >= start * length) & (self.at < stop * length)
        attended = self.reads.attended
        reads = Reads(
            self.reads.tokens[start:stop], None if attended is None else attended[start:stop]
        )
        t = times_of(self.t, self.reads)[start:stop]
        return Pass(reads, t, self.at[own] - start * length), own


class SharedDenoiser:
    """A denoiser whose passes are run by the worker, with those of other requests."""

    def __init__(self, own: Denoiser) -> None:
        self.num_tokens, self.compiled = own.num_tokens, own.compiled

    def logits(self, reads: Reads, t: Tensor | float, at: Tensor) -> Tensor:
        """Logits (R, V), as soon as the worker has them."""
        return cast("Tensor", pause(Pass(reads, t, at)))

    def logits_in_parts(self, reads: Reads, t: Tensor | float, at: Tensor) -> Iterator[Tensor]:
        """All logits, in one part."""
        yield self.logits(reads, t, at)

    def draw(self, reads: Reads, step: Step, options: DrawOptions) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (N,), as soon as the worker has them."""
        wanted = Pass(reads, step.t, step.reads, step, options)
        return cast("tuple[Tensor, Tensor]", pause(wanted))


def pause(wanted: Pass | None) -> object:
    """Let the worker go on with others; return what it brings. None: nothing is waited for."""
    worker = greenlet.getcurrent().parent
    assert worker is not None, "a request runs in a greenlet of the worker's"
    return worker.switch(wanted)


@torch.no_grad()
def run_together(denoiser: Denoiser, passes: Sequence[Pass]) -> list[Drawn | Exception]:
    """Results of passes of one shape, each a result or the error that it alone causes.

    Passes that fail together are run by halves. One that alone is too much for the memory is run
    by halves of its texts.
    """
    try:
        if len(passes) == 1:
            return [_run_one(denoiser, passes[0])]
        return list(_run_joined(denoiser, passes))
    except Exception as error:  # whatever a model, its library or the driver raises
        if len(passes) == 1:
            return [error.with_traceback(None)]
    middle = len(passes) // 2
    # Outside of the handler, whose traceback would hold on to the tensors of what failed.
    return run_together(denoiser, passes[:middle]) + run_together(denoiser, passes[middle:])


def is_out_of_memory(error: BaseException) -> bool:
    """True for what CUDA, the CPU's allocator or Python raise where memory does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _run_one(denoiser: Denoiser, wanted: Pass) -> Drawn:
    try:
        if wanted.step is None or wanted.options is None:
            return _kept(denoiser, denoiser.logits(wanted.reads, wanted.t, wanted.at))
        token, log_p = denoiser.draw(wanted.reads, wanted.step, wanted.options)
        return _kept(denoiser, token), _kept(denoiser, log_p)
    except Exception as error:
        if len(wanted.reads) == 1 or not is_out_of_memory(error):
            raise
    return wanted.finish(_logits_by_halves(denoiser, wanted), compiled=denoiser.compiled)


def _logits_by_halves(denoiser: Denoiser, wanted: Pass) -> Tensor:
    """Logits (R, V) of a pass, text by text where it must be."""
    count, parts = len(wanted.reads), []
    for start, stop in ((0, count // 2), (count // 2, count)):
        part, own = wanted.of_texts(start, stop)
        try:
            logits = denoiser.logits(part.reads, part.t, part.at)
        except Exception as error:
            if stop - start == 1 or not is_out_of_memory(error):
                raise
            logits = None
        if logits is None:
            logits = _logits_by_halves(denoiser, part)
        parts.append((own, logits))
    out = parts[0][1].new_empty(len(wanted.at), parts[0][1].shape[1])
    for own, logits in parts:
        out[own] = logits
    return out


def _run_joined(denoiser: Denoiser, passes: Sequence[Pass]) -> Iterator[Drawn]:
    """Run passes as one; on a GPU those that draw from the denoiser's own law apart, by a graph."""
    drawn = [p.draws_plainly and denoiser.compiled for p in passes]
    graph = iter(_draw(denoiser, [p for p, own in zip(passes, drawn, strict=True) if own]))
    rest = iter(_logits(denoiser, [p for p, own in zip(passes, drawn, strict=True) if not own]))
    for wanted, own in zip(passes, drawn, strict=True):
        yield next(graph) if own else wanted.finish(next(rest), compiled=denoiser.compiled)


def _logits(denoiser: Denoiser, passes: Sequence[Pass]) -> Sequence[Tensor]:
    if not passes:
        return []
    reads, t = _side_by_side(passes)
    logits = _kept(denoiser, denoiser.logits(reads, t, _at(passes)))
    return list(torch.split(logits, [len(p.at) for p in passes]))


def _draw(denoiser: Denoiser, passes: Sequence[Pass]) -> list[tuple[Tensor, Tensor]]:
    steps = [p.step for p in passes if p.step is not None]
    if not steps:
        return []
    reads, t = _side_by_side(passes)
    u = torch.cat([step.u for step in steps])
    step = replace(steps[0], t=t, reads=_at(passes), u=u, row=_rows(steps))
    token, log_p = denoiser.draw(reads, step, PLAIN)
    sizes = [len(step.u) for step in steps]
    tokens, log_ps = (torch.split(_kept(denoiser, part), sizes) for part in (token, log_p))
    return list(zip(tokens, log_ps, strict=True))


def _side_by_side(passes: Sequence[Pass]) -> tuple[Reads, Tensor]:
    """The texts of all passes (U, L), and the times (U,) of each."""
    tokens = torch.cat([p.reads.tokens for p in passes])
    attended = [p.reads.attended for p in passes if p.reads.attended is not None]
    t = torch.cat([times_of(p.t, p.reads) for p in passes])
    return Reads(tokens, torch.cat(attended) if attended else None), t


def _at(passes: Sequence[Pass]) -> Tensor:
    """Flat positions (R,) of what all passes want, in their texts side by side."""
    starts = itertools.accumulate((p.positions for p in passes[:-1]), initial=0)
    return torch.cat([p.at + start for p, start in zip(passes, starts, strict=True)])


def _rows(steps: Sequence[Step]) -> Tensor | None:
    """Which of all reads each token is drawn from; None: the same one."""
    if all(step.row is None for step in steps):
        return None
    rows, start = [], 0
    for step in steps:
        own = torch.arange(len(step.u), device=step.u.device) if step.row is None else step.row
        rows.append(own + start)
        start += len(step.reads)
    return torch.cat(rows)


def _kept(denoiser: Denoiser, result: Tensor) -> Tensor:
    """Keep a result from the next pass, which overwrites that of a graph."""
    return result.clone() if denoiser.compiled else result
