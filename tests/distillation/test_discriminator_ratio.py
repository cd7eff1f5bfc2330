"""What the discriminator learns: the log-ratio of teacher over student, on an enumerated problem.

The loss is the discriminator's own, with its expectation over texts and masks exact and only the
times drawn, so that what is left is the network's error and not that of samples.
"""

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation.losses import smooth_bce
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.process.schedule import LogLinear

from .tables import (
    STATES,
    L,
    V,
    conditionals,
    correlated_law,
    corrupted,
    random_logits,
    sampled_law,
)

SCHEDULE = LogLinear(1e-3)
TEACHER = correlated_law()
STUDENT = (conditionals(TEACHER) + 0.7 * random_logits(1)).log_softmax(-1)
"""The teacher's conditionals, disturbed: (64, L, V)."""
EVERYWHERE = torch.ones(1, L, dtype=torch.bool)
ONE_STEP = sampled_law(STUDENT, [])


def two_step(tau):
    """Law of the texts of a student that stops at τ on its way."""
    alpha, first = SCHEDULE.alpha(tau), SCHEDULE.eps
    return sampled_law(STUDENT, [(alpha - first) / (1 - first)])


def marginals(text_law, t):
    """q_ν and q_θ of every state at times t (T,): (T, 64) each; `text_law` may depend on t."""
    alpha = SCHEDULE.alpha(t)
    student = [corrupted(text_law(s), a[None]) for s, a in zip(t, alpha, strict=True)]
    return torch.cat(student), corrupted(TEACHER, alpha)


def log_ratios(discriminator, t):
    """Logits of every state at times t (T,): (T, 64, L)."""
    sigma = SCHEDULE.sigma(t).repeat_interleave(len(STATES))
    return discriminator(STATES.repeat(len(t), 1), sigma).view(len(t), len(STATES), L)


def trained(text_law, *, time_conditioning, steps=500, lr=1e-2):
    """A discriminator after as many updates, four random times in each."""
    torch.manual_seed(0)
    config = ModelConfig(
        layers=1,
        hidden=32,
        heads=2,
        cond_dim=16,
        vocab_size=V + 1,
        length=L,
        time_conditioning=time_conditioning,
        learned_positions=True,
    )
    discriminator = build_discriminator(config).train()
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=lr, betas=(0.9, 0.99))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        t = torch.rand(4, dtype=torch.float64)
        logits = log_ratios(discriminator, t).flatten(0, 1)
        student, teacher = (q.flatten() / len(t) for q in marginals(text_law, t))
        loss = student @ smooth_bce(logits, EVERYWHERE, 0.0).double()
        loss = (loss + teacher @ smooth_bce(logits, EVERYWHERE, 1.0).double()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return discriminator.eval()


def fit(estimate, truth, weight):
    """Correlation, slope, RMS error, and the deviation of the truth; states by probability."""

    def mean(values):
        return (weight * values).sum()

    a, b = estimate - mean(estimate), truth - mean(truth)
    variance = mean(b.square())
    return (
        float(mean(a * b) / (mean(a.square()) * variance).sqrt()),
        float(mean(a * b) / variance),
        float(mean((estimate - truth).square()).sqrt()),
        float(variance.sqrt()),
    )


@pytest.mark.parametrize(
    ("text_law", "timed"),
    [(two_step, True), (lambda t: ONE_STEP, False)],
    ids=["two steps, coupled time", "one step"],
)
def test_discriminator_recovers_the_log_ratio(text_law, timed):
    """Without label smoothing the logit becomes log q_θ(z, t) / q_ν(z, t), at every position.

    Reached here: correlation 0.9988 and 0.9999, slope 0.985 and 1.002, RMS error 0.047 and 0.015
    (the ratio itself deviates by 0.92 and 1.27, and reaches -5.4), positions 0.04 and 0.03 apart.

    What limits it: the two layers of the head have spectral norm 1 and SiLU a slope of at most 1.1,
    so differences of logits are at most 1.1 times those of the trunk's states. The trunk has no
    norm at its end and must grow its states to the size of the ratio, as it can when it is
    trainable. With the head alone trained on this untrained trunk the slope is 0.08.
    """
    discriminator = trained(text_law, time_conditioning=timed)
    t = torch.linspace(0.03, 0.97, 20, dtype=torch.float64)
    student, teacher = marginals(text_law, t)
    weight = (student + teacher) / (2 * len(t))
    with torch.no_grad():
        logits = log_ratios(discriminator, t).double()
    found = fit(logits.mean(-1), teacher.log() - student.log(), weight)
    correlation, slope, rms, deviation = found
    assert deviation > 0.8, "there is a ratio to learn"
    assert correlation > 0.995
    assert slope == pytest.approx(1, abs=0.05)
    assert rms < 0.08
    assert (weight * logits.var(-1, correction=0)).sum().sqrt() < 0.08


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_mixes_the_laws(smoothing):
    """A free logit settles at log [(1-s) q_θ + s q_ν] - log [(1-s) q_ν + s q_θ], exactly.

    So the smoothed ratio keeps the sign and the order of the true one, and is smaller; it never
    leaves ±log (1-s)/s, which is 2.2 for the paper's 0.1.
    """
    student, teacher = (q[0] for q in marginals(two_step, torch.tensor([0.4]).double()))
    real = (1 - smoothing) * teacher + smoothing * student
    fake = (1 - smoothing) * student + smoothing * teacher
    best = real.log() - fake.log()

    def loss(logit):
        rows = logit[:, None].expand(-1, L)
        of_student = student * smooth_bce(rows, EVERYWHERE, smoothing)
        return (of_student + teacher * smooth_bce(rows, EVERYWHERE, 1 - smoothing)) / 2

    logit = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(logit).sum(), logit)
    assert slope.abs().max() < 1e-15
    for away in (-0.01, 0.01):
        assert (loss(best + away) > loss(best)).all()

    ratio = teacher.log() - student.log()
    assert torch.equal(ratio.argsort(), best.argsort())
    assert ratio[-1] == pytest.approx(0, abs=1e-12), "all masks tell nothing"
    if smoothing:
        assert (best.abs() < ratio.abs())[:-1].all()
        assert best.abs().max() < torch.tensor((1 - smoothing) / smoothing).log()
    else:
        torch.testing.assert_close(best, ratio)
