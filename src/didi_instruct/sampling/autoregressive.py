"""Left-to-right sampling with a cache of keys and values."""

import torch
from torch import Tensor

from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel, KVCache
from didi_instruct.sampling.categorical import draw
from didi_instruct.sampling.chain import PAD, Callback, Canvas, Chain, Draw, Purpose, Samples
from didi_instruct.sampling.decoding import Decoders


@torch.no_grad()
def autoregressive(
    model: ARModel,
    canvas: Canvas,
    *,
    settings: Draw | None = None,
    eot_id: int | None = None,
    callback: Callback | None = None,
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
    _check(model, canvas, eot_id)
    settings = settings or Draw()
    if decoders is not None and callback is None and _can_decode(canvas, settings):
        return _decoded(decoders, model, canvas, settings, eot_id)
    columns = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
    to_write = columns[canvas.open.any(0)].tolist()
    start, end = (to_write[0], to_write[-1] + 1) if to_write else (0, 0)
    # The chain keeps the books; the model is called here, for its cache.
    chain = Chain(model, canvas, settings, steps=max(1, end - start), callback=callback)
    runs = chain.open.any(1)
    cache = KVCache(model.config, batch=int(runs.sum()), length=end)
    # A position is drawn once, so all can share a stream, whatever the other prompts are.
    uniforms = chain.uniforms(Purpose.TOKEN, 0)
    drawn = torch.zeros_like(runs, dtype=torch.long)
    begin = torch.full_like(chain.z[:, :1], model.config.vocab_size - 1)
    unread = torch.cat((begin, chain.z[:, :start]), dim=1)
    for column in range(start, end):
        masked, share = chain.masked, chain.share
        if not masked.any():
            break
        logits = model(unread[runs], cache, last_only=True)[:, -1]
        chain.passes += float(runs.double().mean())
        here = masked & (columns == column)
        if here.any():
            log_p = chain.law(logits[here.any(1)[runs]])
            token = draw(log_p, uniforms[here])
            chain.put(here, token, log_p.gather(-1, token[:, None]).squeeze(-1))
            drawn += here.any(1)
        if eot_id is not None:
            _fill(chain, here, eot_id)
        chain.tell(share, masked & ~chain.masked)
        # What follows the end of a row is read by nobody, but has to be a token.
        last = chain.z[:, column]
        unread = torch.where((last == PAD) | (last == canvas.mask_id), 0, last)[:, None]
    return chain.samples(nfe=max(drawn.tolist(), default=0))


def _can_decode(canvas: Canvas, settings: Draw) -> bool:
    """Whether texts begin with nothing, and passes have the type of the weights."""
    device = canvas.tokens.device.type
    blank = canvas.tokens.numel() > 0 and bool(canvas.open.all())
    return blank and settings.as_it_is and not torch.is_autocast_enabled(device)


def _decoded(
    decoders: Decoders, model: ARModel, canvas: Canvas, settings: Draw, eot_id: int | None
) -> Samples:
    """The same by captured passes, of texts without prompts."""
    batch, length = canvas.tokens.shape
    chain = Chain(model, canvas, settings, steps=length)
    drawn, log_p = decoders.find(batch, length).decode(chain.uniforms(Purpose.TOKEN, 0), eot_id)
    columns = drawn.shape[1]
    counts = torch.ones_like(drawn, dtype=torch.bool)
    if eot_id is not None:
        end = (drawn == eot_id).long()
        counts = end.cumsum(1) - end == 0  # up to the first one, and that as well
        chain.z.fill_(eot_id)
    chain.z[:, :columns] = drawn.where(counts, chain.z[:, :columns])
    chain.log_prob += log_p.where(counts, 0.0).sum(1)
    chain.passes = float(columns)
    return chain.samples(nfe=int(counts.sum(1).max()))


def _fill(chain: Chain, here: Tensor, eot_id: int) -> None:
    """Fill what is left of the samples that have just drawn the end of text."""
    over = (here & (chain.z == eot_id)).any(1, keepdim=True)
    rest = chain.masked & over
    count = int(rest.sum())
    token = torch.full((count,), eot_id, device=chain.z.device)
    chain.put(rest, token, torch.zeros(count, dtype=torch.float64, device=chain.z.device))


def _check(model: ARModel, canvas: Canvas, eot_id: int | None) -> None:
    """Refuse rows that cannot be written from left to right."""
    config, tokens = model.config, canvas.tokens
    if tokens.shape[1] > config.length:
        raise UserError(f"{tokens.shape[1]} positions, but the model reads {config.length}.")
    for name, token in (("mask_id", canvas.mask_id), ("eot_id", eot_id)):
        if token is not None and (0 <= token < config.num_tokens) != (name == "eot_id"):
            raise UserError(f"{name} is {token}, and the tokens are 0..{config.num_tokens - 1}.")
    given = (tokens != canvas.mask_id) & (tokens != PAD)
    if bool((given & ((tokens < 0) | (tokens >= config.num_tokens))).any()):
        raise UserError(f"A given token is not one of 0..{config.num_tokens - 1}.")
    prompt = given.cumprod(1).bool()
    if bool((given & ~prompt).any()):
        raise UserError(
            "A left-to-right model cannot fill a gap: give a prompt alone, or use a masked model."
        )
    if bool((canvas.open & ~(prompt | canvas.open).cumprod(1).bool()).any()):
        raise UserError("There is padding before a position to write: put it at the end.")
