"""Losses of distillation: divergences, scores of paths, rewards and advantages, weights of times.

One sign everywhere: a log-ratio is teacher over student, so the student maximises its reward.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from didi_instruct.distillation.rollout import Jump
from didi_instruct.models.compile import Fused, fuses, fusing
from didi_instruct.models.layers import upcast
from didi_instruct.models.network import Network, logits_at, states_at
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.plan import flat_positions
from didi_instruct.sampling.state import Reads
from didi_instruct.training.replica import padded
from didi_instruct.transfer import sent

# Divergences between categorical laws without zeros (softmaxes), row by row, in nats


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p - log q): (..., V), (..., V) -> (...)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p log p: (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


def divergence(kind: str, log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """Distance of a student from its teacher: (..., V), (..., V) -> (...).

    forward: KL(teacher ‖ student); backward: KL(student ‖ teacher); jeffreys: their mean.
    """
    match kind:
        case "forward":
            return kl(log_teacher, log_student)
        case "backward":
            return kl(log_student, log_teacher)
        case "jeffreys":
            return (kl(log_teacher, log_student) + kl(log_student, log_teacher)) / 2
    raise ValueError(f"`{kind}` is not a divergence")


# Terms of a loss in one pass over the logits, where torch compiles. Written operation by operation,
# each of them would read and write rows of the size of the vocabulary: on a GPU that costs more
# than the trunk. The gradient has a closed form, which is one more pass; what it has at the drawn
# tokens is put there in full precision, where a sum of rounded tensors would cancel to noise for a
# token that is nearly certain.


class LossTerms(NamedTuple):
    """Numbers of rows of logits, (R,) each."""

    entropy: Tensor
    distance: Tensor  # divergence from the teacher; 0 without one
    drawn: Tensor  # (N,) float64, log-probabilities of the drawn tokens


def terms(
    logits: Tensor,
    teacher: Tensor | None = None,
    kind: str = "forward",
    drawn: tuple[Tensor, Tensor] | None = None,
) -> LossTerms:
    """Entropy of each row, its divergence from the teacher's, log-probabilities of drawn tokens.

    Logits (R, V) of both need not be normalised; the teacher has no gradient. `drawn` are rows and
    tokens, (N,) both; by default there are none.
    """
    none = torch.zeros(0, dtype=torch.long, device=logits.device)
    row, token = drawn or (none, none)
    found: Any = _Terms.apply(logits, teacher, kind, row, token)  # type: ignore[no-untyped-call]
    return LossTerms(*found)


class _Terms(Function):
    """Values, and the closed form of their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor | None, kind: str, row: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_sum, own, teacher_logsumexp, distance, backward_kl = _fused_values(
            logits, teacher, kind
        )
        rows = log_sum, own, teacher_logsumexp, backward_kl
        ctx.save_for_backward(logits, teacher, *rows, row, token)
        ctx.kind, ctx.fuses = kind, fuses(logits)
        drawn = logits[row, token].double() - log_sum[row].double()
        return own, distance, drawn

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, *rows, row, token = ctx.saved_tensors
        g_entropy, g_distance, g_drawn = gradients
        given = g_drawn.to(rows[0].dtype)
        # Each drawn token takes its part from all tokens of the row.
        g_sum = torch.zeros_like(rows[0]).index_add(0, row, -given)
        per_row = (*rows, g_sum, g_entropy, g_distance)
        with fusing(ctx.fuses):  # gradients have a thread of their own, which was not told
            slopes = _fused_slopes(logits, teacher, ctx.kind, *per_row)
        if len(row):
            reference = None if teacher is None else teacher[row, token]
            own = _slopes(logits[row, token], reference, ctx.kind, *(x[row] for x in per_row))
            exact = own + _sum_of_equals(row * logits.shape[1] + token, given)
            slopes.index_put_((row, token), exact.to(slopes.dtype))
        return slopes, None, None, None, None


def _values(
    logits: Tensor, teacher: Tensor | None, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-sum of exp, entropy; log-sum of the teacher, divergence from it, KL(own ‖ teacher).

    The last one is 0 where nothing needs it.
    """
    x = upcast(logits)
    log_sum = x.logsumexp(-1)
    log_p = x - log_sum[:, None]
    own = entropy(log_p)
    if teacher is None:
        zeros = torch.zeros_like(own)
        return log_sum, own, zeros, zeros.clone(), zeros.clone()
    y = upcast(teacher)
    teacher_logsumexp = y.logsumexp(-1)
    log_q = y - teacher_logsumexp[:, None]
    distance = divergence(kind, log_q, log_p)
    backward_kl = torch.zeros_like(own) if kind == "forward" else kl(log_p, log_q)
    return log_sum, own, teacher_logsumexp, distance, backward_kl


def _slopes(logits: Tensor, teacher: Tensor | None, kind: str, *rows: Tensor) -> Tensor:
    """Gradient with respect to logits: of rows (R, V) in their type, of single ones (N,) in full.

    Of the log-sum p, of the entropy -p (log p + H), of KL(q ‖ p) p - q, of KL(p ‖ q)
    p (log p - log q - KL(p ‖ q)). `rows` are values of each row and the slopes of their sums.
    """
    whole = logits.ndim > 1
    if whole:
        rows = tuple(value[:, None] for value in rows)
    log_sum, own, teacher_logsumexp, backward_kl, g_sum, g_entropy, g_distance = rows
    log_p = upcast(logits) - log_sum
    p = log_p.exp()
    slopes = p * (g_sum - g_entropy * (log_p + own))
    if teacher is not None:
        log_q = upcast(teacher) - teacher_logsumexp
        if kind != "forward":
            share = 1.0 if kind == "backward" else 0.5
            slopes = slopes + share * g_distance * p * (log_p - log_q - backward_kl)
        if kind != "backward":
            share = 1.0 if kind == "forward" else 0.5
            slopes = slopes + share * g_distance * (p - log_q.exp())
    return slopes.to(logits.dtype) if whole else slopes


def _sum_of_equals(key: Tensor, values: Tensor) -> Tensor:
    """For each value the sum of all that have its key, (N,) all; does not wait for a GPU."""
    ranked, order = key.sort()
    first = torch.ones_like(ranked)
    first[1:] = ranked.diff() != 0
    group = first.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add(0, group, values[order])
    return torch.empty_like(values).index_copy(0, order, sums[group])


_fused_values: Fused[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = Fused(_values, "A loss")
_fused_slopes: Fused[..., Tensor] = Fused(_slopes, "A gradient")


LOGIT_ROWS = 1024
"""Rows of logits that a loss holds at once, where it computes them in parts."""


class HeadInParts(NamedTuple):
    """The output layer as a loss computes it some rows at a time, for large vocabularies."""

    rows: int  # of logits that are held at once
    teacher: Callable[[Tensor], Tensor]  # states (R, d) of the teacher -> its logits (R, V)


def terms_in_parts(
    network: Network,
    states: Tensor,
    teacher: Tensor | None,
    kind: str,
    drawn: tuple[Tensor, Tensor],
    parts: HeadInParts,
) -> LossTerms:
    """`terms` of the logits at states (R, d) of a network without time.

    `teacher` (R, d) are states too. Logits of a part are computed again for its gradient, so no
    more than `parts.rows` of them are there at once.
    """
    row, token = drawn
    found, order = [], []

    def of_part(states: Tensor, teacher: Tensor | None, row: Tensor, token: Tensor) -> LossTerms:
        with torch.no_grad():
            law = None if teacher is None else parts.teacher(teacher)
        return terms(network.head(states), law, kind, (row, token))

    for first in range(0, len(states), parts.rows):
        some = slice(first, first + parts.rows)
        inside = ((row >= first) & (row < first + parts.rows)).nonzero().squeeze(1)
        given = states[some], None if teacher is None else teacher[some]
        own = row[inside] - first, token[inside]
        kept: Any = checkpoint(of_part, *given, *own, use_reentrant=False)
        found.append(LossTerms(*kept))
        order.append(inside)
    drawn_log_p = torch.cat([each.drawn for each in found])
    return LossTerms(
        torch.cat([each.entropy for each in found]),
        torch.cat([each.distance for each in found]),
        torch.zeros_like(drawn_log_p).index_copy(0, torch.cat(order), drawn_log_p),
    )


# Scores of a rollout's tokens under the student


class PathScore(NamedTuple):
    """Scores of texts, (B,) float64 each."""

    log_prob: Tensor  # of the drawn tokens, summed over jumps
    kl: Tensor  # divergence from the teacher, mean over the masks of a state, summed over jumps
    entropy: Tensor  # mean over the masks of a state and over jumps


def score_path(
    network: Network,
    schedule: Schedule,
    jumps: Sequence[Jump],
    x: Tensor,
    teacher_logits: Sequence[Tensor | None],
    kind: str = "forward",
    reads: Callable[[Tensor], Reads] = Reads,
    parts: HeadInParts | None = None,
) -> PathScore:
    """Score the tokens of x (B, L) along `jumps`, with gradient, Eq. (9).

    The distinct states of all jumps are read in one pass. `teacher_logits` are those at the masks
    of each jump's states, or all None. `reads` gives texts as the network reads them. With
    `parts`, `teacher_logits` are the teacher's states (R, d).
    """
    device, length = x.device, x.shape[1]
    z, t = torch.cat([jump.z for jump in jumps]), torch.cat([jump.t for jump in jumps])
    masked = torch.cat([jump.masked for jump in jumps])
    before = itertools.accumulate((len(jump.z) for jump in jumps), initial=0)
    state = torch.stack([jump.state + n for jump, n in zip(jumps, before, strict=False)])
    jump, text, position = torch.stack([jump.writes for jump in jumps]).nonzero(as_tuple=True)
    row = masked.flatten().cumsum(0)[state[jump, text] * length + position] - 1
    places = flat_positions(masked)
    count, at = len(places), padded(places, device)
    plan = masked.sum(1).clamp(min=1), state, row, text, position
    mask_counts, state, row, text, position = (sent(each, device) for each in plan)
    known = [logits for logits in teacher_logits if logits is not None]
    padding = [each.new_zeros(len(at) - count, each.shape[1]) for each in known[:1]]
    teacher = torch.cat(known + padding) if known else None
    texts = reads(z)
    drawn = row, x[text, position]
    if parts is None:
        logits = logits_at(network, texts.tokens, schedule.sigma(t), at, texts.attended)
        found = terms(logits, teacher, kind, drawn)
    else:
        states = states_at(network, texts.tokens, at, texts.attended)
        found = terms_in_parts(network, states, teacher, kind, drawn, parts)
    state_of_mask = at[:count] // length

    def mean_of_states(values: Tensor) -> Tensor:
        sums = torch.zeros(len(z), dtype=torch.float64, device=device)
        means = sums.index_add(0, state_of_mask, values[:count].double()) / mask_counts
        return means[state]

    return PathScore(
        torch.zeros(len(x), dtype=torch.float64, device=device).index_add(0, text, found.drawn),
        mean_of_states(found.distance).sum(0),
        mean_of_states(found.entropy).mean(0),
    )


# The discriminator's loss, and its log-ratios as rewards and advantages


def smooth_bce(log_ratio: Tensor, where: Tensor, target: float) -> Tensor:
    """Cross-entropy against one target, mean over the selected positions of each text, Eq. (8).

    Shapes: log_ratio (B, L), where (B, L) -> (B,); 0 where nothing is selected.
    """
    losses = F.binary_cross_entropy_with_logits(
        log_ratio, torch.full_like(log_ratio, target), reduction="none"
    )
    return torch.where(where, losses, 0.0).sum(1) / where.sum(1).clamp(min=1)


def rewards(log_ratio: Tensor, masked: Tensor, written: Tensor) -> Tensor:
    """Mean log-ratio over the masked positions of each text, Eq. (6); over the written if none is.

    Shapes: all (B, L) -> (B,).
    """
    where = torch.where(masked.any(1, keepdim=True), masked, written)
    return torch.where(where, log_ratio, 0.0).sum(1) / where.sum(1).clamp(min=1)


class Advantages(NamedTuple):
    """Rewards compared with those of other texts."""

    values: Tensor  # (B,)
    clip_fraction: Tensor  # share of them that was clipped


def advantages(
    reward: Tensor, group_size: int, *, baseline: str = "mean", scale: str = "group",
    eps: float = 1e-6, clip: float = 0.0,
) -> Advantages:  # fmt: skip
    """Centre rewards (B,) within groups of consecutive texts, scale, clip, Eq. (7).

    `mean` with scale `group` standardises as in the paper (population variance); `leave-one-out`
    compares with the others of the group, so it is independent of the text's own tokens.
    """
    groups = reward.double().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        divisor = centred.square().mean(1, keepdim=True).sqrt() + eps
    elif scale == "batch":
        divisor = centred.square().mean().sqrt() + eps
    else:
        divisor = torch.ones((), dtype=torch.float64, device=reward.device)
    if baseline == "leave-one-out":
        # r - mean of the others = (r - mean of all) * G / (G - 1)
        centred = centred * (group_size / (group_size - 1))
    values = (centred / divisor).flatten()
    if not clip:
        return Advantages(values, torch.zeros((), dtype=torch.float64, device=reward.device))
    clipped = values.clamp(-clip, clip)
    return Advantages(clipped, (clipped != values).double().mean())


# Times: the law π that draws them, the weight ω that they get. π is Beta(a, b) with whole a and b,
# the a-th smallest of a + b - 1 uniform numbers, so that a draw is a pure function of uniforms.

MARGIN = 2.0**-24
"""Distance of a drawn time from 0 and 1: neither t nor 1 - t rounds away in float32."""


def beta_times(a: int, b: int, uniforms: Tensor) -> Tensor:
    """Draw times from Beta(a, b): uniforms (n, a + b - 1) or more columns -> (n,)."""
    smallest = uniforms[:, : a + b - 1].sort(1).values
    return smallest[:, a - 1].clamp(MARGIN, 1 - MARGIN)


def beta_density(a: int, b: int, t: Tensor) -> Tensor:
    """Density of Beta(a, b) at t in (0, 1)."""
    constant = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    return constant * t ** (a - 1) * (1 - t) ** (b - 1)


def omega(schedule: Schedule, t: Tensor, kind: str, min_time: float) -> Tensor:
    """Weight of time t in the integral KL: 1, or -alpha'_t / (1 - alpha_t) held at min_time below.

    The paper's table prints alpha_t for alpha'_t by mistake: that would not be positive.
    """
    if kind == "constant":
        return t.new_ones(t.shape)
    return schedule.nelbo_weight(t.clamp(min=min_time))
