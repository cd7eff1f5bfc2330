"""Scoring reads each distinct state once; that must be what reading every copy gives."""

import itertools

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from didi_instruct.distillation.losses import score_path
from didi_instruct.distillation.rollout import Jump, Noise, rollout
from didi_instruct.process.schedule import make_schedule

from .small import Table, small_network

L, V, MASK = 8, 5, 5
TEXTS = 12

timed = pytest.mark.parametrize("timed", [False, True], ids=["constant", "timed"])


def double_network(seed, timed):
    """Float64 weights; logits are rounded to float32 before the softmax, whoever asks."""
    return small_network(seed, time_conditioning=timed).double()


def drawn(network, *, shared=1, prompts=False):
    """A rollout of the network itself, with times of all sizes."""
    schedule = make_schedule(network.config.schedule)

    @torch.no_grad()
    def rows(z, t, where):
        return network(z, schedule.sigma(t)).log_softmax(-1)[where]

    start, owner = torch.full((1, L), MASK), torch.zeros(TEXTS, dtype=torch.long)
    if prompts:
        start, owner = start.repeat(3, 1), torch.arange(TEXTS) // 4
        start[:, :2] = torch.tensor([[0, 1], [2, 3], [4, 4]])
    tau = torch.linspace(0.02, 0.98, TEXTS // shared, dtype=torch.float64).repeat_interleave(shared)
    noise = Noise(3, torch.arange(TEXTS))
    return rollout(rows, schedule, start, owner, tau, noise, MASK, shared=shared), schedule


def dense(jump):
    """The same jump with a copy of its state for every text."""
    copies = torch.arange(len(jump.state))
    return Jump(
        jump.z[jump.state], jump.t[jump.state], copies, jump.writes, jump.masked[jump.state]
    )


@torch.no_grad()
def laws_of(teacher, schedule, jumps):
    return [
        teacher(jump.z, schedule.sigma(jump.t)).log_softmax(-1)[jump.z == MASK] for jump in jumps
    ]


def scores_and_gradients(network, schedule, jumps, x, laws):
    """All that `score_path` gives, and the gradient of a random mixture of it."""
    network.zero_grad()
    scores = score_path(network, schedule, jumps, x, laws, "jeffreys")
    generator = torch.Generator().manual_seed(8)
    mixture = sum(
        (torch.randn(TEXTS, generator=generator, dtype=torch.float64) * values).sum()
        for values in scores
    )
    mixture.backward()
    return scores, {n: p.grad.clone() for n, p in network.named_parameters()}


def assert_same(ours, theirs):
    scores, gradients = ours
    for one, other in zip(scores, theirs[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for name, gradient in theirs[1].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6 * scale, msg=name)


@timed
@pytest.mark.parametrize("with_laws", [True, False], ids=["laws", "no laws"])
def test_all_masks_read_once_give_the_dense_gradient(timed, with_laws):
    """One row of masks for all texts against one for each: values and every parameter's gradient.

    Without laws the entropy is taken where tokens are drawn, which is less for a single text, so
    there only the log-probability is compared.
    """
    network, teacher = double_network(1, timed), double_network(2, timed)
    result, schedule = drawn(network)
    assert len(result.jumps[0].z) == 1
    copies = [dense(jump) for jump in result.jumps]
    if with_laws:
        ours, theirs = (
            scores_and_gradients(
                network, schedule, jumps, result.x, laws_of(teacher, schedule, jumps)
            )
            for jumps in (result.jumps, copies)
        )
        assert_same(ours, theirs)
    else:
        ours, theirs = (
            score_path(network, schedule, jumps, result.x, [None, None])
            for jumps in (result.jumps, copies)
        )
        torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-6, atol=1e-6)
        assert not ours.kl.any()


@timed
def test_a_shared_state_read_once_gives_the_dense_gradient(timed):
    """Groups of 4 that stand at one z_τ, of which the last jump is scored."""
    network, teacher = double_network(1, timed), double_network(2, timed)
    result, schedule = drawn(network, shared=4)
    last = result.jumps[-1:]
    assert len(last[0].z) == TEXTS // 4
    ours, theirs = (
        scores_and_gradients(network, schedule, jumps, result.x, laws_of(teacher, schedule, jumps))
        for jumps in (last, [dense(last[0])])
    )
    assert_same(ours, theirs)


@timed
def test_prompts_read_once_give_the_dense_gradient(timed):
    network, teacher = double_network(1, timed), double_network(2, timed)
    result, schedule = drawn(network, prompts=True)
    assert len(result.jumps[0].z) == 3
    ours, theirs = (
        scores_and_gradients(network, schedule, jumps, result.x, laws_of(teacher, schedule, jumps))
        for jumps in (result.jumps, [dense(jump) for jump in result.jumps])
    )
    assert_same(ours, theirs)


@timed
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("prompts", [False, True])
@torch.no_grad()
def test_scores_are_those_computed_by_hand(timed, kind, prompts):
    """Text by text, from whole forward passes and torch's own laws.

    log P is the sum over the tokens of both jumps; the KL a mean over masks, summed over the jumps;
    the entropy a mean over masks, averaged over the jumps.
    """
    network, teacher = double_network(1, timed), double_network(2, timed)
    result, schedule = drawn(network, prompts=prompts)
    laws = laws_of(teacher, schedule, result.jumps)
    scores = score_path(network, schedule, result.jumps, result.x, laws, kind)
    z_tau = result.jumps[1].z
    for text in range(TEXTS):
        start = torch.where(result.written[text], MASK, result.x[text])
        log_prob, kl, entropy = 0.0, 0.0, 0.0
        times = torch.ones(1), result.jumps[1].t[text][None]
        path = (start, z_tau[text], result.x[text])
        for t, (z, after) in zip(times, itertools.pairwise(path), strict=True):
            masked = z == MASK
            student, reference = (
                Categorical(logits=model(z[None], schedule.sigma(t))[0])
                for model in (network, teacher)
            )
            written = masked & (after != MASK)
            log_prob += float(student.log_prob(result.x[text])[written].sum())
            pair = (reference, student) if kind == "forward" else (student, reference)
            if masked.any():
                kl += float(kl_divergence(*pair)[masked].mean())
                entropy += float(student.entropy()[masked].mean()) / 2
        assert scores.log_prob[text].item() == pytest.approx(log_prob, rel=1e-6, abs=1e-5)
        assert scores.kl[text].item() == pytest.approx(kl, rel=1e-5)
        assert scores.entropy[text].item() == pytest.approx(entropy, rel=1e-5)
    torch.testing.assert_close(scores.log_prob, result.log_prob, rtol=1e-6, atol=1e-5)


def test_a_state_without_masks_scores_nothing():
    """z_τ may be text already: its jump draws nothing, and has neither KL nor entropy."""
    network = double_network(1, False)
    schedule = make_schedule(network.config.schedule)
    x = torch.zeros(2, L, dtype=torch.long)
    nothing = torch.zeros(2, L, dtype=torch.bool)
    jump = Jump(x, torch.full((2,), 0.1).double(), torch.arange(2), nothing, x == MASK)
    for law in (None, torch.zeros(0, V)):
        scores = score_path(network, schedule, [jump], x, [law])
        assert all(values.tolist() == [0.0, 0.0] for values in scores)
        scores.log_prob.sum().backward()


def test_scores_of_random_jumps_equal_a_loop_over_the_table():
    """Several distinct states, owned at random: bookkeeping alone, no network."""
    table, generator = Table(seed=3), torch.Generator().manual_seed(0)
    schedule = make_schedule(small_network(eps=1e-9).config.schedule)
    z = torch.randint(4, (6, 3), generator=generator)
    t = torch.rand(6, generator=generator, dtype=torch.float64)
    owner = torch.randint(6, (20,), generator=generator)
    where = (torch.rand(20, 3, generator=generator) < 0.5) & (z == 3)[owner]
    x = torch.randint(3, (20, 3), generator=generator)
    scores = score_path(table, schedule, [Jump(z, t, owner, where, z == 3)], x, [None])
    log_p = table(z, t)
    for text in range(20):
        expected = sum(float(log_p[owner[text], i, x[text, i]]) for i in where[text].nonzero())
        assert scores.log_prob[text].item() == pytest.approx(expected, abs=1e-5)
