"""Left-to-right sampling with a cache of keys and values."""

import torch

from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel, KVCache
from didi_instruct.sampling.draw import Purpose, invert, law_of
from didi_instruct.sampling.engines.cuda import Decoders
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.sampling.state import PAD, Canvas, Samples, State


@torch.no_grad()
def autoregressive(
    model: ARModel,
    state: State,
    *,
    eot_id: int | None = None,
    decoders: Decoders | None = None,
) -> Samples:
    """Draw token after token, x^l ~ p(x^l | x^1 .. x^(l-1)), after the start symbol.

    Every row is a prompt, then positions to write, then padding; each part may be missing. As much
    as the shortest prompt has is read in one pass; then the rows advance together, those still
    inside their prompt with its tokens.

    A sample that draws `eot_id` is over: its later positions are filled with that token, at no cost
    in `log_prob`, and sampling stops when all samples are over. `nfe` is the number of tokens drawn
    in the longest sample; `passes` counts each reading of new positions as one.

    By `decoders` texts are written that have no prompt, as the model has them and unwatched; the
    others as without.
    """
    _check(state.canvas)
    if decoders is not None and state.callback is None and _can_decode(state):
        return _decoded(decoders, state, eot_id)
    columns = torch.arange(state.z.shape[1], device=state.z.device)
    to_write = columns[state.open.any(0)].tolist()
    start, end = (to_write[0], to_write[-1] + 1) if to_write else (0, 0)
    state.steps = end - start
    runs = state.open.any(1)
    cache = KVCache(model.config, batch=int(runs.sum()), length=end)
    # A position is drawn once, so all can share a stream, whatever the other prompts are.
    u = state.noise.uniforms(len(columns), Purpose.TOKEN, 0)
    drawn = torch.zeros_like(runs, dtype=torch.long)
    begin = torch.full_like(state.z[:, :1], model.config.vocab_size - 1)
    unread = torch.cat((begin, state.z[:, :start]), dim=1)
    for column in range(start, end):
        masked = state.masked
        share = float(masked.sum() / state.open.sum().clamp(min=1))
        if not masked.any():
            break
        logits = model(unread[runs], cache, last_only=True)[:, -1]
        state.passes += float(runs.double().mean())
        here = masked & (columns == column)
        writes = here.any(1)
        if writes.any():
            log_p = law_of(logits[writes[runs]], state.settings)
            token = invert(log_p, u[here])
            state.write(flat_positions(here), token, log_p.gather(-1, token[:, None]).squeeze(-1))
            drawn += writes
        if eot_id is not None:  # what is left of a text that has just drawn its end
            over = writes & (state.z[:, column] == eot_id)
            rest = flat_positions(state.masked & over[:, None])
            state.write(rest, torch.full_like(rest, eot_id), torch.zeros_like(rest))
        state.report(share)
        # What follows the end of a row is read by nobody, but has to be a token.
        last = state.z[:, column]
        unread = torch.where((last == PAD) | (last == state.mask_id), 0, last)[:, None]
    return state.samples(nfe=max(drawn.tolist(), default=0))


def _can_decode(state: State) -> bool:
    """True for texts that begin with nothing, if passes have the type of the weights."""
    blank = state.z.numel() > 0 and bool(state.open.all())
    autocast = torch.is_autocast_enabled(state.z.device.type)
    return blank and not state.settings.restricted and not autocast


def _decoded(decoders: Decoders, state: State, eot_id: int | None) -> Samples:
    """Sample texts without prompts by captured passes."""
    batch, length = state.z.shape
    u = state.noise.uniforms(length, Purpose.TOKEN, 0)
    drawn, log_p = decoders.find(batch, length).decode(u, eot_id)
    columns = drawn.shape[1]
    counts = torch.ones_like(drawn, dtype=torch.bool)
    if eot_id is not None:
        end = (drawn == eot_id).long()
        counts = end.cumsum(1) - end == 0  # up to the first one, and that as well
        state.z.fill_(eot_id)
    state.z[:, :columns] = drawn.where(counts, state.z[:, :columns])
    state.costs[:, :columns] = log_p.where(counts, 0.0)
    state.passes = float(columns)
    return state.samples(nfe=int(counts.sum(1).max()))


def _check(canvas: Canvas) -> None:
    """Refuse rows that cannot be written from left to right."""
    given = (canvas.tokens != canvas.mask_id) & (canvas.tokens != PAD)
    prompt = given.cumprod(1).bool()
    if bool((given & ~prompt).any()):
        raise UserError(
            "A left-to-right model cannot fill a gap: give a prompt alone, or use a masked model."
        )
    if bool((canvas.open & ~(prompt | canvas.open).cumprod(1).bool()).any()):
        raise UserError("There is padding before a position to write: put it at the end.")
