"""First-hitting sampling (Zheng et al. 2025): the reverse process in continuous time, exactly.

No step ever reveals two tokens at once, so with an exact denoiser the samples are exact.
"""

import torch

from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.chain import Callback, Canvas, Chain, Denoiser, Draw, Purpose, Samples


@torch.no_grad()
def first_hitting(
    denoiser: Denoiser,
    schedule: Schedule,
    canvas: Canvas,
    *,
    settings: Draw | None = None,
    callback: Callback | None = None,
) -> Samples:
    """Reveal one token at a time, at the times at which the reverse process would.

    Going back from t = 1 a mask survives until the masked level is m = 1 - alpha with probability
    m / m_1, on its own: the level at which it is revealed is uniform on (0, m_1). One number per
    mask thus gives both the order and the times. The next of n masks comes at the highest of n such
    levels, m' = m u^(1/n), and is any of them, which is how the paper draws them one by one.

    The denoiser sees the state just before a token is revealed, at the time at which it is: the
    token is drawn by the rate of the jump, which belongs to that moment, not to the last one. Every
    sample has its own times. `nfe` is the number of masks of the longest.
    """
    nfe = max(canvas.open.sum(1).tolist(), default=0)
    chain = Chain(denoiser, canvas, settings or Draw(), steps=max(1, nfe), callback=callback)
    # A position that is not open comes after all others; its level is never looked at.
    uniform = chain.uniforms(Purpose.ORDER, 0).masked_fill(~chain.open, -1.0)
    level, position = uniform.sort(dim=1, descending=True, stable=True)
    masked_at_start = 1 - schedule.alpha(1.0).item()
    times = schedule.time(1 - masked_at_start * level.clamp(min=0.0))
    columns = torch.arange(chain.z.shape[1], device=chain.z.device)
    for n in range(nfe):
        share = chain.share
        reveal = chain.masked & (columns == position[:, n, None])
        logits = chain.logits(times[:, n], reveal)
        chain.write(reveal, logits, Purpose.TOKEN, n)
        chain.tell(share, reveal)
    return chain.samples(nfe=nfe)
