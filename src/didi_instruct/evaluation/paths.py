"""Path KL: how far a sampler's law is from a judge's, whatever its temperature.

An ancestral sampler knows the probability of its own draws. The order in which positions are
revealed does not depend on the model, and given the order a sequence x has one path, so

    path entropy = -E sum log p(drawn token | state)  =  H(x | order)  <=  H(x)
    path KL      = E[-log judge(x)] - path entropy    >=  KL(sampler || judge)

with equality where the text does not depend on the order. A temperature that sharpens the samples
lowers both terms: the difference falls only if the samples come closer to the judge's law.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.sampling.state import Samples
from didi_instruct.training.likelihood import nats_of_texts
from didi_instruct.training.objectives import Batch

Judge = Callable[[Tensor], Tensor]
"""Log p of each sequence, or a lower bound of it: (B, L), where the samples are -> (B,) float64."""


@dataclass(frozen=True, slots=True)
class PathKL:
    """Nats per sequence."""

    path_entropy: float
    judge_nats: float
    """Cross-entropy of the samples under the judge, the mean of -log p."""
    path_kl: float
    """judge_nats - path_entropy."""
    path_kl_se: float
    """Standard error over the samples, infinite for one."""
    samples: int


def path_kl(samples: Samples, judge: Judge) -> PathKL:
    """Path KL of samples to the judge's law; too high where the judge gives a lower bound."""
    gaps = path_gaps(samples, judge)
    assert samples.log_prob is not None
    path_entropy = -samples.log_prob.mean().item()
    mean, error = _mean_and_error(gaps)
    return PathKL(path_entropy, mean + path_entropy, mean, error, len(gaps))


def path_gaps(samples: Samples, judge: Judge) -> Tensor:
    """Log q(path) - log p(x) of each sample, whose mean is the path KL: (B,), float64, CPU."""
    if samples.log_prob is None:
        raise UserError(
            "These samples come from a sampler that does not know the probability of its path, "
            "so they have no path KL: draw them with sampler `ancestral`."
        )
    log_p = judge(samples.tokens)
    if log_p.shape != samples.log_prob.shape:
        raise ValueError(
            f"the judge gave {tuple(log_p.shape)} for {len(samples.tokens)} sequences: "
            "give one log-probability for each"
        )
    return samples.log_prob.double().cpu() - log_p.double().cpu()


def paired_difference(gaps_a: Tensor, gaps_b: Tensor) -> tuple[float, float]:
    """Path KL of a minus that of b, from `path_gaps` (B,) of both, and its standard error.

    Samples drawn with one seed and equally many steps share their reveal order and uniforms. What
    they have in common cancels, so the error is smaller than that of two separate estimates.
    """
    if gaps_a.shape != gaps_b.shape:
        raise ValueError(
            f"{len(gaps_a)} samples cannot be paired with {len(gaps_b)}: draw equally many"
        )
    return _mean_and_error(gaps_a - gaps_b)


def gap_closed(teacher_few: float, student_few: float, teacher_many: float) -> float:
    """Part of the path KL that few steps cost the teacher, and that the student wins back.

    (KL[teacher@N] - KL[student@N]) / (KL[teacher@N] - KL[teacher@max]): 0 is the teacher, 1 is as
    good as all its steps.
    """
    gap = teacher_few - teacher_many
    if not gap > 0:
        raise ValueError(
            f"the teacher's path KL is {teacher_few:.4g} with few steps and {teacher_many:.4g} "
            "with many: there is no gap to close"
        )
    return (teacher_few - student_few) / gap


def gap_closed_resampled(
    teacher_few: NDArray[np.float64],
    student_few: NDArray[np.float64],
    teacher_many: NDArray[np.float64],
) -> NDArray[np.float64]:
    """`gap_closed` in every resample (R,), NaN where the teacher has no gap."""
    gap = teacher_few - teacher_many
    share: NDArray[np.float64] = (teacher_few - student_few) / np.where(gap > 0, gap, np.nan)
    return share


def nelbo_judge(
    loss: Callable[[Batch], Tensor],
    config: ModelConfig,
    *,
    draws: int = 8,
    batch_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Judge:
    """Judge by a model: minus the NELBO of a diffusion model, the exact log p of an AR model.

    `loss` is the network's part of the objective, as for `likelihood`. The NELBO is estimated from
    `draws` noise levels per sequence, without bias. The noise follows the row, so that samplers
    which are compared row by row are judged with the same. Where texts have windows of their own,
    it judges them up to their ends, which fill the rest; the cost of a text's length is part of it.
    """

    def judge(tokens: Tensor) -> Tensor:
        clean = tokens.cpu()
        nats, _ = nats_of_texts(
            loss,
            config,
            lambda start, count: clean[start : start + count],
            sequences=len(clean),
            draws=draws,
            batch_size=batch_size,
            seed=seed,
            device=device,
        )
        return -nats

    return judge


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return values.mean().item(), error
