"""Samplers over real networks: a time that is read, padding, weights that change, compilers.

Written for `make_denoiser` and `DiscriminatorGuide` over any `Network`; in float64, so that
rounding changes no draw.
"""

import pytest
import torch
from tests.random_models import randomise

from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.network import Mixture
from didi_instruct.sampling import guide as guides
from didi_instruct.sampling.denoiser import make_denoiser
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.guide import DiscriminatorGuide, Guidance
from didi_instruct.sampling.guided import rgas
from didi_instruct.sampling.state import PAD, Canvas, Reads, State
from didi_instruct.sampling.variants import first_hitting

from .engines import small
from .engines.small import SCHEDULE
from .toys import MASK, L, V, by_hand


def make(**changes):
    """A network, and a discriminator over another."""
    shape = {"hidden": 16, "vocab_size": V + 1, "length": L} | changes
    network, other = (small.make(seed=seed, **shape) for seed in range(2))
    return network, randomise(Discriminator.from_network(other), 2).eval()


def dense(network):
    """All logits of texts one by one, without what is padding."""

    @torch.no_grad()
    def function(z, t):
        logits = torch.zeros(*z.shape, V, dtype=torch.float64)
        for row, time, out in zip(z, t, logits, strict=True):
            there = row != PAD
            sigma = SCHEDULE.sigma(time[None]) if network.config.time_conditioning else None
            out[there] = network(row[there][None], sigma)[0]
        return logits

    return function


class DenseGuide:
    """A discriminator that reads texts one by one and shows vectors at all positions."""

    def __init__(self, critic):
        self.critic, self.embedding = critic, critic.vectors[:V].detach()

    def embed(self, z):
        return self.critic.vectors[z].detach()

    def score(self, embeddings, z, t):
        ratio = []
        for row, vectors, time in zip(z, embeddings, t, strict=True):
            there = row != PAD
            mixture = Mixture(torch.arange(int(there.sum())), vectors[there])
            timed = self.critic.config.time_conditioning
            sigma = SCHEDULE.sigma(time[None].float()) if timed else None
            found = self.critic(row[there][None], sigma, None, mixture)[0].double()
            ratio.append(torch.zeros(len(row), dtype=torch.float64).masked_scatter(there, found))
        return torch.stack(ratio)


def some_texts():
    tokens = torch.full((6, L), MASK)
    tokens[1, 1:3], tokens[2], tokens[3, 4:], tokens[4, :5] = 2, 1, PAD, 3
    return Canvas(tokens, MASK, torch.arange(6))


@pytest.mark.parametrize("timed", [True, False])
def test_a_network_that_reads_the_time_gets_that_of_each_sample(timed):
    """First-hitting, where every sample has its own: as each sample alone, padding or not."""
    network, _ = make(time_conditioning=timed)
    denoiser, canvas = make_denoiser(network, SCHEDULE), some_texts()
    whole = first_hitting(denoiser, SCHEDULE, State(canvas))
    for row, tokens in enumerate(canvas.tokens):
        there = tokens != PAD
        alone = Canvas(tokens[there][None], MASK, torch.tensor([row]))
        found = first_hitting(denoiser, SCHEDULE, State(alone))
        assert torch.equal(found.tokens[0], whole.tokens[row, there])
        torch.testing.assert_close(found.log_prob[0], whole.log_prob[row])


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    "guidance",
    [
        Guidance(h_start=3.0, h_end=9.0),
        Guidance(h_start=-3.0, h_end=3.0, split=1.0, clamp=0.1),
        Guidance(split=0.0, select="best", score="mean", candidates=3),
    ],
    ids=["both", "tilting", "re-ranking"],
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_guided_sampling_of_networks_is_that_by_hand(timed, guidance, options):
    """Gradients of Eq. (10) by autograd through a dense pass over each text alone."""
    network, critic = make(time_conditioning=timed)
    run = {"steps": 4, "guidance": guidance}
    settings, canvas = DrawOptions(seed=3, **options), some_texts()
    denoiser, guide = make_denoiser(network, SCHEDULE), DiscriminatorGuide(critic, SCHEDULE)
    result = rgas(denoiser, SCHEDULE, guide, State(canvas, settings), **run)
    tokens, log_prob, calls = by_hand(
        dense(network), SCHEDULE, canvas, options=settings, guide=DenseGuide(critic), **run
    )
    assert torch.equal(result.tokens, tokens)
    assert result.disc_calls == max(calls)
    if result.log_prob is not None:
        torch.testing.assert_close(result.log_prob, log_prob)
    # Parameters that require gradients have none afterwards.
    assert all(p.requires_grad and p.grad is None for p in critic.parameters())
    assert all(p.grad is None for p in network.parameters())


def test_vectors_of_a_guide_are_padded_and_follow_its_weights():
    _, critic = make()
    guide = DiscriminatorGuide(critic, SCHEDULE)
    before = guide.vectors(16)
    assert before.shape == (16, 16)
    assert guide.vectors(16) is before
    assert torch.equal(before[:V], critic.vectors[:V])
    assert not before[V:].any()
    kept = before.clone()
    with torch.no_grad():
        critic.vectors.mul_(2)
    assert torch.equal(guide.vectors(16), 2 * kept)


# Compilers


def questions(rows):
    """Texts, and a gradient at some of their masks."""
    reads = Reads(torch.full((rows, L), MASK))
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(rows * L, 16, generator=generator, dtype=torch.float64)
    return reads, (reads, 0.5, Mixture(torch.arange(rows * L), vectors), reads.tokens == MASK)


def test_a_guide_compiles_texts_once_and_gradients_once(monkeypatch):
    """By dynamo itself, running the graph as it is: for all numbers of texts."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(guides, "compiled", lambda f: torch.compile(f, backend=counter))
    torch._dynamo.reset()
    _, critic = make()
    guide, plain = (DiscriminatorGuide(critic, SCHEDULE, fast=fast) for fast in (True, False))
    for rows in (5, 1, 3, 8):
        reads, _ = questions(rows)
        torch.testing.assert_close(guide.log_ratio(reads, 0.5), plain.log_ratio(reads, 0.5))
    assert counter.frame_count == 1
    for rows in (5, 1, 3, 8):
        _, given = questions(rows)
        torch.testing.assert_close(guide.gradient(*given), plain.gradient(*given))
    assert counter.frame_count == 2


@pytest.mark.parametrize("at_once", [True, False], ids=["no-compiler", "compiling-fails"])
def test_a_guide_that_cannot_be_compiled_guides_plainly(at_once, monkeypatch):
    """Whether torch refuses when it is asked or in the first pass; said once, tried once."""
    tried, said = [], []

    def refuse(*arguments):
        tried.append(1)
        raise RuntimeError("There is no compiler.\nInstall one.")

    monkeypatch.setattr(guides, "compiled", refuse if at_once else lambda function: refuse)
    monkeypatch.setattr(guides, "warn_once", said.append)
    network, critic = make()
    denoiser = make_denoiser(network, SCHEDULE)
    run = {"steps": 6, "guidance": Guidance(h_start=3.0)}
    both = [DiscriminatorGuide(critic, SCHEDULE, fast=fast) for fast in (False, True)]
    expected, found = (
        rgas(denoiser, SCHEDULE, guide, State(some_texts()), **run) for guide in both
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert tried == [1]
    reason = "There is no compiler"
    assert said == [f"A discriminator cannot be compiled here, so it runs slower: {reason}"]


def test_a_guide_that_lacks_memory_says_so(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(guides, "compiled", lambda function: full)
    guide, (reads, given) = DiscriminatorGuide(make()[1], SCHEDULE, fast=True), questions(2)
    for question in (lambda: guide.log_ratio(reads, 0.5), lambda: guide.gradient(*given)):
        with pytest.raises(torch.OutOfMemoryError):
            question()


class Refused(torch.autograd.Function):
    """What a compiler cannot do, it learns when it is asked for gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no backward pass")


def test_a_guide_whose_gradients_cannot_be_compiled_has_plain_ones(monkeypatch):
    """Said once, tried once."""
    _, critic = make()
    _, given = questions(2)
    expected = DiscriminatorGuide(critic, SCHEDULE).gradient(*given)
    tried, said = [], []

    def half(function):
        tried.append(1)
        return lambda *inputs: Refused.apply(function(*inputs))

    monkeypatch.setattr(guides, "compiled", half)
    monkeypatch.setattr(guides, "warn_once", said.append)
    guide = DiscriminatorGuide(critic, SCHEDULE, fast=True)
    for _ in range(2):
        torch.testing.assert_close(guide.gradient(*given), expected)
    assert tried == [1]
    assert len(said) == 1
    assert "no backward pass" in said[0]
