"""RGAS, the reward-guided ancestral sampler: Algorithm 2.

The first steps tilt the logits along the gradient of a discriminator's reward (Eq. 10), the others
draw several candidates and keep one by its reward (Eq. 11). High reward means teacher-like.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from didi_instruct.config.model import Order
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.categorical import draw
from didi_instruct.sampling.chain import (
    Callback,
    Canvas,
    Chain,
    Denoiser,
    Draw,
    Purpose,
    Samples,
)
from didi_instruct.sampling.grids import Grid
from didi_instruct.sampling.guidance import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    Guidance,
    Guide,
    check_vocabularies,
    total_score,
)
from didi_instruct.sampling.guided_planned import Parts, can_plan_guided, planned_rgas
from didi_instruct.sampling.reveals import Reveals
from didi_instruct.sampling.tilting import mixture, slopes, tilted

SOFTMAX_ROWS = 4096
"""Rows of probabilities held at a time; of the logits there is one row per mask."""


@torch.no_grad()
def rgas(
    denoiser: Denoiser,
    schedule: Schedule,
    guide: Guide | None,
    canvas: Canvas,
    *,
    steps: int,
    settings: Draw | None = None,
    guidance: Guidance | None = None,
    grid: Grid | None = None,
    order: Order = "random",
    callback: Callback | None = None,
) -> Samples:
    """Algorithm 2: ancestral sampling whose early steps tilt and whose late steps re-rank.

    Temperature, top-p and top-k apply after tilting. With h = 0 and M = 1 it is `ancestral`, bit
    for bit (but for rounding where passes are captured), and needs no guide. Tilting depends on
    the state alone, so its path has an exact probability; re-ranking has none (`log_prob` is
    None). `disc_calls` is that of the sample with the most.
    """
    guidance = guidance or Guidance()
    scales = guidance.scales(steps)
    reranks = guidance.candidates > 1 and len(scales) < steps
    guided = reranks or any(scales)
    # The law of a guided step is not the denoiser's, whose code could be summed out.
    known = not reranks and (canvas.masks == 1 or not guided)
    settings = settings or Draw()
    settings = replace(settings, measure_path=settings.measure_path and known)
    chain = Chain(denoiser, canvas, settings, steps=steps, callback=callback)
    reveals = Reveals(chain, schedule, grid, order)
    times = reveals.times
    if guided and guide is None:
        raise UserError(
            "RGAS needs a discriminator, and this model has none: distil with --method didi, "
            "or use another sampler."
        )
    if guided and can_plan_guided(denoiser, guide, canvas):
        parts = Parts(denoiser, guide, chain, reveals, guidance)  # type: ignore[arg-type]
        return planned_rgas(parts, exact_path=known)

    calls = torch.zeros(len(chain.z), dtype=torch.long, device=chain.z.device)
    for n in range(steps):
        if n >= len(scales) and reranks:
            assert guide is not None
            candidates = draw_candidates(chain, guidance.candidates, n, reveals)
            reveal = choose(chain, guide, candidates, guidance, n, times[n + 1])
            calls += guidance.candidates * candidates.ran
        else:
            reveal = reveals(n)
            h = scales[n] if n < len(scales) else 0.0
            if reveal.any():
                if h == 0:
                    logits = chain.logits(times[n], reveal)
                else:
                    assert guide is not None
                    logits = tilted_logits(chain, guide, times[n], reveal, h, guidance.clamp)
                    calls += reveal.any(1)
                chain.write(reveal, logits, Purpose.TOKEN, n)
        chain.tell(times[n], reveal)
    disc_calls = max(calls.tolist(), default=0)
    return chain.samples(nfe=steps, exact_path=known, disc_calls=disc_calls)


# Tilting


@torch.no_grad()
def tilted_logits(
    chain: Chain, guide: Guide, t: float, reveal: Tensor, h: float, clamp: float
) -> Tensor:
    """Logits + h * gradient of the reward, where tokens are about to be drawn: Eq. (10).

    The reward of a sample is the sum of the log-ratios over its masks, each of which shows the
    guide the average embedding under the denoiser. So the denoiser's output is needed at all masks
    of the samples that reveal something, but a gradient only where they do.

    Shapes: reveal (B, L) -> (R, V), the selected positions in order.
    """
    source = _sources(chain, reveal.any(1))
    runs = torch.zeros_like(reveal[:, 0]).index_fill_(0, source, True)
    masked = chain.masked & runs[:, None]
    logits = chain.logits(t, masked)
    embedding = guide.embedding
    check_vocabularies(len(embedding), logits.shape[1])
    parts = torch.split(logits, SOFTMAX_ROWS)
    mixed = torch.cat([mixture(part, embedding) for part in parts])
    gradient = reward_gradient(guide, chain.z[runs], masked[runs], mixed, t)
    chain.passes += FORWARD_AND_BACKWARD * int(runs.sum()) / len(chain.z)

    sample, position = reveal.nonzero(as_tuple=True)
    rank = masked.flatten().cumsum(0).view_as(masked) - 1
    rows = rank[source[sample], position]
    slope = slopes(gradient[rows], embedding, torch.promote_types(logits.dtype, torch.float32))
    return tilted(logits[rows], slope, *(slope.new_full((), x) for x in (h, clamp)))


def _sources(chain: Chain, active: Tensor) -> Tensor:
    """The row (B,) that is run for each active one: itself, or the first of them if all are equal.

    Such as in the first step, where all are masks. Rows at rest share an active row.
    """
    z, rows = chain.z, active.nonzero()[:, 0]
    states = (z, chain.masked, chain.code)  # the same masks may be to be written in some rows only
    if all(bool((state[active] == state[rows[0]]).all()) for state in states):
        return rows[:1].expand(len(z))
    return torch.where(active, torch.arange(len(z), device=z.device), rows[0])


def reward_gradient(guide: Guide, z: Tensor, masked: Tensor, mixed: Tensor, t: float) -> Tensor:
    """Gradient of the summed log-ratios of the masks with respect to their mixed embeddings.

    No parameter of the guide accumulates a gradient.

    Shapes: z and masked (B, L), mixed (R, d) -> (R, d), with R the masks in order.
    """
    hard = guide.embed(z)
    with torch.enable_grad():
        soft = mixed.to(hard.dtype).detach().requires_grad_()
        embeddings = hard.masked_scatter(masked[..., None], soft)
        reward = guide.score(embeddings, z, _times(z, t))[masked].sum()
        (gradient,) = torch.autograd.grad(reward, soft)
    return gradient


# Re-ranking


@dataclass(frozen=True, slots=True)
class Candidates:
    """M possible next states of every sample."""

    z: Tensor
    """(M, B, L)."""
    reveal: Tensor
    """(M, B, L) positions that a candidate writes."""
    log_p: Tensor
    """(M, B, L) log-probability of the tokens written, 0 elsewhere."""

    @property
    def ran(self) -> Tensor:
        """(B,) samples of which any candidate writes something: the others need no pass."""
        return self.reveal.any(0).any(1)


def draw_candidates(chain: Chain, num: int, n: int, reveals: Reveals) -> Candidates:
    """Draw M next states, each with its own coins and tokens, from one pass of the denoiser.

    The first candidate has the noise of `ancestral`; the others add their number to the streams.
    """
    streams = [(n,), *((n, m) for m in range(1, num))]
    reveal = torch.stack([reveals(*stream) for stream in streams])
    z = chain.z.repeat(num, 1, 1)
    log_p = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    either = reveal.any(0)
    if either.any():
        logits = chain.logits(reveals.times[n], either)
        for m, stream in enumerate(streams):
            numbers = chain.uniforms(Purpose.TOKEN, *stream)[reveal[m]]
            if len(numbers):
                token, own = chain.draw(logits[reveal[m][either]], numbers)
                z[m, reveal[m]], log_p[m, reveal[m]] = token, own
    return Candidates(z, reveal, log_p)


def choose(
    chain: Chain, guide: Guide, candidates: Candidates, guidance: Guidance, n: int, s: float
) -> Tensor:
    """Take one candidate per sample by its score at time s, after the step: Eq. (11).

    Shape: -> (B, L), the positions that this wrote.
    """
    ran = candidates.ran
    choice = torch.zeros(len(ran), dtype=torch.long, device=ran.device)
    if ran.any():
        num = len(candidates.z)
        z = candidates.z[:, ran].flatten(0, 1)
        log_ratio = guide.score(guide.embed(z), z, _times(z, s))
        written = chain.open[ran].repeat(num, 1)
        scores = total_score(log_ratio, z, written, chain.canvas.mask_id, guidance.score)
        scores = scores.view(num, -1).T
        chain.passes += FORWARD * len(z) / len(ran)
        if guidance.select == "best":
            choice[ran] = scores.argmax(1)
        else:
            uniforms = chain.uniforms(Purpose.SELECT, n)[ran, 0]
            choice[ran] = draw(scores.log_softmax(1), uniforms)
    chosen = (choice, torch.arange(len(choice), device=choice.device))
    reveal = candidates.reveal[chosen]
    chain.put(reveal, candidates.z[chosen][reveal], candidates.log_p[chosen][reveal])
    return reveal


def _times(z: Tensor, t: float) -> Tensor:
    """One time per row."""
    return torch.full((len(z),), t, dtype=torch.float32, device=z.device)
