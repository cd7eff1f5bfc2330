"""Scores of a rollout's tokens under the student, all of its jumps in one pass."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from didi_instruct.distillation.hosting import Tensors, places
from didi_instruct.distillation.rollout import Jump
from didi_instruct.distillation.terms import terms
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.network import logits_at
from didi_instruct.transfer import sent


def score(
    network: DiT,
    schedule: Schedule,
    jumps: Sequence[Jump],
    x: Tensor,
    laws: Sequence[Tensor | None],
    kind: str = "forward",
) -> Tensors:
    """Score the tokens of x under the student, with gradient; each distinct state is read once.

    The states of all jumps are read in one pass. Returns for each text (B,): `log_prob` of its
    drawn tokens over all jumps; `kl` to the teacher's `laws` (logits at the masks of each jump's
    states, or all None), mean over masks, summed over jumps; `entropy`, mean over masks and jumps.
    """
    device, masks = x.device, torch.cat([masks_of(jump) for jump in jumps])
    place, count = places(masks, device)
    counts = masks.sum(1).clamp(min=1)
    row = (masks.flatten().cumsum(0) - 1).view_as(masks)
    first = [0, *itertools.accumulate(len(jump.z) for jump in jumps)]
    rows, owners = [], []
    for jump, offset in zip(jumps, first, strict=False):
        text, position = jump.planned
        owners.append(offset + jump.owner)
        rows.append(row[owners[-1][text], position])
    counts, drawn_from, owner = (
        sent(plan, device) for plan in (counts, torch.cat(rows), torch.stack(owners))
    )
    text, position = (torch.cat(each) for each in zip(*(j.drawn for j in jumps), strict=True))
    z, t = torch.cat([jump.z for jump in jumps]), torch.cat([jump.t for jump in jumps])
    known = [law for law in laws if law is not None]
    more = [law.new_zeros(len(place) - count, law.shape[1]) for law in known[:1]]
    law = torch.cat(known + more) if known else None
    logits = logits_at(network, z, schedule.sigma(t), place)
    found = terms(logits, law, kind, (drawn_from, x[text, position]))
    none = torch.zeros(len(x), dtype=torch.float64, device=device)
    state = place[:count] // x.shape[1]
    return {
        "log_prob": none.index_add(0, text, found.drawn),
        "kl": _means(found.distance[:count], state, counts)[owner].sum(0),
        "entropy": _means(found.entropy[:count], state, counts)[owner].mean(0),
    }


def masks_of(jump: Jump) -> Tensor:
    """Masks (U, L) of a jump's states."""
    assert jump.masked is not None, "a rollout knows its masks"
    return jump.masked


def _means(values: Tensor, state: Tensor, counts: Tensor) -> Tensor:
    """Mean of each state's values: values, state (R,), counts (U,) -> (U,)."""
    sums = torch.zeros(len(counts), dtype=torch.float64, device=values.device)
    return sums.index_add(0, state, values.double()) / counts
