import itertools

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import PAD, Canvas, Chain, Draw
from didi_instruct.sampling.guidance import Guidance
from didi_instruct.sampling.guided import rgas, tilted_logits
from didi_instruct.sampling.network import NetworkDenoiser, NetworkGuide
from didi_instruct.sampling.tilting import logit_gradient, slopes

SCHEDULE = LogLinear(0.0)
TIMED = LogLinear(1e-3)
"""For networks that see sigma, which is infinite at t = 1 if nothing is left unmasked there."""
CONFIG = ModelConfig(
    layers=2, hidden=16, heads=2, cond_dim=8, vocab_size=8, length=6, time_conditioning=True
)


class ToyGuide:
    """Positions that look at each other and at the time; NaN at padding, which nobody may read."""

    def __init__(self, num_tokens, width=5, scale=1.0, seed=3, at_padding=torch.nan):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(num_tokens + 1, width, generator=generator, dtype=torch.float64)
        self.table, self.scale, self.at_padding = table, scale, at_padding
        self.mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
        self.embedding = table[:num_tokens]

    def embed(self, z):
        return self.table[z]

    def score(self, embeddings, z, t):
        there = (z != PAD)[..., None]
        mean = (embeddings * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        score = (
            self.scale * (0.5 + 2 * t[:, None]) * ((embeddings @ self.mix) * mean).sum(-1).tanh()
        )
        return score.masked_fill(z == PAD, self.at_padding)


class LinearGuide:
    """A known reward: every token has its worth, and a mask none."""

    def __init__(self, worth):
        self.worth = torch.tensor(worth, dtype=torch.float64)
        self.embedding = torch.eye(len(worth), dtype=torch.float64)

    def embed(self, z):
        return torch.cat([self.embedding, torch.zeros_like(self.embedding[:1])])[z]

    def score(self, embeddings, z, t):
        return embeddings @ self.worth


class Forbidden:
    """A guide that must not be asked."""

    embedding = torch.eye(3)

    def embed(self, z):
        raise AssertionError("the guide was asked")

    def score(self, embeddings, z, t):
        raise AssertionError("the guide was asked")


class Counting:
    """A denoiser and a guide that count the rows of their passes."""

    def __init__(self, language, guide):
        self.language, self.guide, self.embedding = language, guide, guide.embedding
        self.denoised = self.outputs = self.scored = self.differentiated = 0

    def rows(self, z, t, where):
        self.denoised += len(z)
        self.outputs += int(where.sum())
        return self.language.denoiser(z, t)[where]

    def embed(self, z):
        return self.guide.embed(z)

    def score(self, embeddings, z, t):
        if embeddings.requires_grad:
            self.differentiated += len(z)
        else:
            self.scored += len(z)
        return self.guide.score(embeddings, z, t)

    @property
    def passes(self):
        return self.denoised + self.scored + 3 * self.differentiated


def randomise(network, seed):
    """Give every parameter, the zero-initialised ones too, a value that matters; in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name else noise * (0.4 if p.ndim > 1 else 0.1))
    return network.double().eval()


def networks():
    dit = randomise(DiT(CONFIG), 0)
    with torch.no_grad():
        dit.output_layer.linear.weight.mul_(0.05)  # so that no token is certain
    return NetworkDenoiser(dit, TIMED), NetworkGuide(randomise(Discriminator(CONFIG), 1), TIMED)


def dense_tilt(denoiser, guide, z, mask_id, t, h, clamp):
    """Eq. (10) by autograd through softmax(logits) @ E, at every position: (B, L, V)."""
    times = torch.full((len(z),), t)
    logits = denoiser(z, times).detach().requires_grad_()
    masked = z == mask_id
    soft = logits.softmax(-1) @ guide.embedding.detach()
    embeddings = torch.where(masked[..., None], soft, guide.embed(z).detach())
    reward = guide.score(embeddings, z, times)[masked].sum()
    (gradient,) = torch.autograd.grad(reward, logits)
    return (logits + h * gradient.clamp(-clamp, clamp)).detach()


# Tilting


def test_the_closed_form_gradient_is_the_chain_rule():
    """The derivative of softmax(logits) @ E . g with respect to logits is p * (E g - p . E g)."""
    generator = torch.Generator().manual_seed(0)
    logits, E, g = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in [(6, 9), (9, 4), (6, 4)]
    )
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(((logits.softmax(-1) @ E) * g).sum(), logits)
    found = logit_gradient(logits.softmax(-1), slopes(g, E, torch.float64))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["toy", "network"])
@pytest.mark.parametrize("clamp", [1.0, 1e-3, float("inf")])
def test_tilted_logits_are_those_of_autograd(kind, clamp):
    """With given tokens, padding, a sample at rest and positions that stay masked."""
    denoiser, guide = networks()
    if kind == "toy":
        guide = ToyGuide(7)
    z = torch.tensor([[7, 1, 7, 7, 7, 0], [7, 7, 2, 7, PAD, PAD], [7, 7, 7, 7, 7, 7]])
    reveal = torch.zeros_like(z, dtype=torch.bool)
    reveal[0, [0, 3]] = reveal[1, [1]] = True
    chain = Chain(denoiser, Canvas(z, 7, torch.arange(3)), Draw(), steps=1)
    ours = tilted_logits(chain, guide, 0.7, reveal, h=5.0, clamp=clamp)
    tilted = dense_tilt(denoiser, guide, z, 7, 0.7, 5.0, clamp)
    torch.testing.assert_close(ours, tilted[reveal])
    change = (ours - denoiser(z, torch.full((3,), 0.7))[reveal]).abs()
    assert float(change.max()) > 4e-3
    assert clamp > 1e-2 or float(change.max()) == pytest.approx(5 * clamp)
    assert chain.passes == pytest.approx((2 + 3 * 2) / 3)


def test_mixtures_of_16_bits_are_those_of_32():
    """Up to the rounding of what is mixed: a guide that hears of it says the same."""

    class Listener(ToyGuide):
        """It remembers what it was shown."""

        heard: torch.Tensor

        def score(self, embeddings, z, t):
            self.heard = embeddings.detach().double()
            return super().score(embeddings, z, t)

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 6, 7, generator=generator).bfloat16()
    z, where = torch.full((64, 6), 7), torch.ones(64, 6, dtype=torch.bool)
    heard = []
    for dtype in (torch.float64, torch.bfloat16):
        guide = Listener(7)
        guide.embedding = guide.embedding.to(dtype)
        canvas = Canvas(z, 7, torch.arange(64))
        chain = Chain(lambda z, t: logits[: len(z)], canvas, Draw(), steps=1)
        chain.z = z.clone()
        chain.z[0, 0] = 1  # no longer all alike
        tilted_logits(chain, guide, 0.7, where & chain.masked, h=1.0, clamp=1.0)
        heard.append(guide.heard)
    assert (heard[1] - heard[0]).abs().max() < 0.02 * heard[0].abs().max()


def law_of_tilting(language, guide, guidance, steps):
    """Law of the tilted sampler: reveal coins by enumeration, tokens from dense_tilt."""
    V, L = language.num_tokens, language.length
    states = {(V,) * L: 1.0}
    for n, h in enumerate(guidance.scales(steps)):
        chance = 1 / (steps - n)
        z = torch.tensor(list(states))
        p = dense_tilt(language.denoiser, guide, z, V, 1 - n / steps, h, guidance.clamp).softmax(-1)
        # Of each position: stay masked (the last column), or be revealed as a token.
        moves = torch.cat([chance * p, torch.full_like(p[..., :1], 1 - chance)], -1)
        stays = torch.nn.functional.one_hot(z, V + 1).double()
        moves = torch.where((z == V)[..., None], moves, stays)
        following = {}
        for new in itertools.product(range(V + 1), repeat=L):
            mass = moves[:, range(L), new].prod(1) @ torch.tensor(list(states.values())).double()
            if mass > 0:
                following[new] = mass.item()
        states = following
    return states


def chi_square(tokens, law, base):
    """Of tokens (B, L) against {sequence: probability}."""
    assert sum(law.values()) == pytest.approx(1)
    powers = base ** torch.arange(tokens.shape[1])
    expected = torch.zeros(base ** tokens.shape[1], dtype=torch.float64)
    for state, p in law.items():
        expected[int((torch.tensor(state) * powers).sum())] += len(tokens) * p
    counts = torch.bincount((tokens * powers).sum(1), minlength=len(expected))
    assert int(counts[expected == 0].sum()) == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("steps", "h_start", "h_end"), [(1, 2.0, 2.0), (1, -2.0, -2.0), (2, 1.0, 4.0), (3, -3.0, 3.0)]
)
def test_tilting_has_the_enumerated_law(steps, h_start, h_end):
    """softmax(logits + h clamp(grad)) at t_n, h on a line; chi-square, 80 degrees, 6e-5.

    The untilted sampler must fail the same test, or it would prove nothing.
    """
    language, guide, n = OracleLanguage.tiny(), ToyGuide(3), 20_000
    guidance = Guidance(h_start=h_start, h_end=h_end, split=1.0, clamp=0.3)
    assert guidance.scales(steps)[:: max(steps - 1, 1)] == [h_start, h_end][: min(steps, 2)]
    law = law_of_tilting(language, guide, guidance, steps)
    run = {"steps": steps, "settings": Draw(seed=1)}
    canvas = Canvas.blank(n, 4, 3)
    result = rgas(language.denoiser, SCHEDULE, guide, canvas, guidance=guidance, **run)
    assert result.log_prob is not None  # the tilted law is a function of the state: a path has one
    assert chi_square(result.tokens, law, 3) < 138
    plain = ancestral(language.denoiser, SCHEDULE, canvas, **run)
    assert chi_square(plain.tokens, law, 3) > 138


def test_temperature_applies_after_tilting():
    """At temperature 0 a step takes the best token of the tilted logits."""
    language, guide = OracleLanguage.tiny(), LinearGuide([0.0, 0.0, 1.0])
    z = torch.full((1, 4), 3)
    tilted = dense_tilt(language.denoiser, guide, z, 3, 1.0, 100.0, 1.0)
    run = {"steps": 1, "settings": Draw(temperature=0.0)}
    guidance = Guidance(h_start=100.0, split=1.0)
    canvas = Canvas.blank(2, 4, 3)
    result = rgas(language.denoiser, SCHEDULE, guide, canvas, guidance=guidance, **run)
    assert torch.equal(result.tokens, tilted.argmax(-1).expand(2, 4))
    plain = ancestral(language.denoiser, SCHEDULE, canvas, **run)
    assert not torch.equal(result.tokens, plain.tokens)


# Re-ranking


def candidate_law(language, state, chance):
    """Law of one ancestral step from a state: {next state: probability}."""
    V = language.num_tokens
    p = language.denoiser(torch.tensor([state]))[0].exp().tolist()
    options = [
        [(v, chance * p[i][v]) for v in range(V)] + [(V, 1 - chance)]
        if token == V
        else [(token, 1)]
        for i, token in enumerate(state)
    ]
    law = {}
    for moves in itertools.product(*options):
        mass = 1.0
        for _, q in moves:
            mass *= q
        if mass > 0:
            law[tuple(v for v, _ in moves)] = mass
    return law


def law_of_reranking(language, guide, guidance, steps):
    """Law of the re-ranked sampler with M = 2: all pairs of candidates, weighed by Eq. (11)."""
    V, L = language.num_tokens, language.length

    def reward(state, t):
        z = torch.tensor([state])
        score = guide.score(guide.embed(z), z, torch.tensor([t]))[0].tolist()
        if guidance.score == "sum":
            return sum(score)
        masked = [r for r, token in zip(score, state, strict=True) if token == V]
        return sum(masked) / max(len(masked), 1)

    def chance_of_first(a, b):
        if guidance.select == "best":
            return float(a >= b)
        return torch.tensor(a - b, dtype=torch.float64).sigmoid().item()

    states = {(V,) * L: 1.0}
    for n in range(steps):
        after = 1 - (n + 1) / steps
        following = {}
        for state, mass in states.items():
            law = candidate_law(language, state, 1 / (steps - n))
            rewards = {new: reward(new, after) for new in law}
            for a, b in itertools.product(law, repeat=2):
                first = chance_of_first(rewards[a], rewards[b])
                for new, share in ((a, first), (b, 1 - first)):
                    following[new] = following.get(new, 0.0) + mass * law[a] * law[b] * share
        states = {state: mass for state, mass in following.items() if mass > 0}
    return states


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("select", ["sample", "best"])
def test_reranking_has_the_enumerated_law(steps, score, select):
    """Two candidates, scored at t_{n-1}; chi-square over 9 sequences, 8 degrees, 3e-5."""
    language, n = OracleLanguage.tiny(num_tokens=3, slots=2, sentences=1), 20_000
    guide = ToyGuide(3, scale=2.0)
    guidance = Guidance(candidates=2, split=0.0, score=score, select=select)
    law = law_of_reranking(language, guide, guidance, steps)
    run = {"steps": steps, "settings": Draw(seed=7)}
    canvas = Canvas.blank(n, 2, 3)
    result = rgas(language.denoiser, SCHEDULE, guide, canvas, guidance=guidance, **run)
    assert result.log_prob is None
    assert chi_square(result.tokens, law, 3) < 35
    plain = ancestral(language.denoiser, SCHEDULE, canvas, **run)
    # By the mean, the last step (here the only one) cannot tell candidates apart.
    assert (chi_square(plain.tokens, law, 3) > 35) == (score == "sum" or steps > 1)


def test_the_best_of_many_candidates_is_the_best():
    """The candidates of fewer are among those of more, so no sample can get worse."""
    language, guide = OracleLanguage.tiny(slots=2, sentences=1), LinearGuide([0.0, 1.0, 3.0])
    canvas, settings = Canvas.blank(50, 2, 3), Draw(seed=2)
    worths = []
    for num in (1, 2, 8, 64):
        guidance = Guidance(candidates=num, split=0.0, select="best")
        result = rgas(
            language.denoiser,
            SCHEDULE,
            guide,
            canvas,
            steps=1,
            settings=settings,
            guidance=guidance,
        )
        worths.append(guide.worth[result.tokens].sum(1))
    for fewer, more in itertools.pairwise(worths):
        assert bool((more >= fewer).all())
        assert more.mean() > fewer.mean()


def test_a_callback_sees_the_chosen_candidate():
    """Its tokens, the positions it wrote, and the probability that the denoiser gave to them."""
    language, canvas, seen = OracleLanguage.tiny(), Canvas.blank(30, 4, 3), []
    rgas(
        language.denoiser,
        SCHEDULE,
        ToyGuide(3),
        canvas,
        steps=3,
        guidance=Guidance(split=0.0),
        callback=seen.append,
    )
    for before, step in zip([canvas.tokens, *(s.tokens for s in seen[:-1])], seen, strict=True):
        p = language.denoiser(before).exp().gather(-1, step.tokens.clamp(max=2)[..., None])
        torch.testing.assert_close(step.confidence[step.revealed], p[..., 0][step.revealed])
        assert torch.equal(step.revealed, before != step.tokens)


# Guidance


@pytest.mark.parametrize("split", [0.0, 0.5, 1.0])
def test_guidance_towards_a_known_reward_raises_it(split):
    """And h < 0 lowers it. Worth per token, 4,000 samples: 5 standard errors, 6e-7 at most."""
    language, guide = OracleLanguage.tiny(), LinearGuide([0.0, 1.0, -1.0])
    canvas = Canvas.blank(4000, 4, 3)

    def worths(h, candidates):
        guidance = Guidance(h_start=h, h_end=h, candidates=candidates, split=split)
        result = rgas(language.denoiser, SCHEDULE, guide, canvas, steps=4, guidance=guidance)
        worth = guide.worth[result.tokens].mean(1)
        return worth.mean(), worth.std() / len(worth) ** 0.5

    plain, error = worths(0.0, 1)
    assert worths(5.0, 4)[0] > plain + 5 * 2**0.5 * error
    if split > 0:
        assert worths(-5.0, 1)[0] < plain - 5 * 2**0.5 * error


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", [0, 1, 99])
@pytest.mark.parametrize("kind", ["oracle", "network"])
def test_without_h_and_with_one_candidate_it_is_ancestral(steps, seed, kind):
    """Bit for bit: tokens, log-probabilities, passes and what a callback sees; no guide asked."""
    oracle = kind == "oracle"
    denoiser = OracleLanguage.tiny().denoiser if oracle else networks()[0]
    canvas = Canvas.blank(9, 4, 3) if oracle else Canvas.blank(9, 6, 7)
    settings = Draw(seed=seed, temperature=0.9, top_p=0.95)
    theirs, ours = [], []
    run = {"steps": steps, "settings": settings, "grid": "cosine"}
    expected = ancestral(denoiser, SCHEDULE, canvas, callback=theirs.append, **run)
    guidance = Guidance(h_start=0.0, h_end=0.0, candidates=1)
    for guide in (Forbidden(), None):
        ours.clear()
        result = rgas(
            denoiser, SCHEDULE, guide, canvas, guidance=guidance, callback=ours.append, **run
        )
        assert torch.equal(result.tokens, expected.tokens)
        assert torch.equal(result.log_prob, expected.log_prob)
        assert (result.nfe, result.passes) == (expected.nfe, expected.passes)
        assert result.disc_calls == 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.index, a.time) == (b.index, b.time)
        assert torch.equal(a.confidence, b.confidence)
        assert torch.equal(a.revealed, b.revealed)


def test_the_first_candidate_is_ancestral():
    """A guide that prefers none leaves `best` with the first candidate: the noise of ancestral."""
    language, guide = OracleLanguage.tiny(), LinearGuide([0.0, 0.0, 0.0])
    run = {"steps": 3, "settings": Draw(seed=4)}
    canvas = Canvas.blank(20, 4, 3)
    guidance = Guidance(candidates=3, split=0.0, select="best")
    result = rgas(language.denoiser, SCHEDULE, guide, canvas, guidance=guidance, **run)
    assert torch.equal(result.tokens, ancestral(language.denoiser, SCHEDULE, canvas, **run).tokens)


@pytest.mark.parametrize(
    "guidance",
    [Guidance(), Guidance(split=0.0, select="best", score="mean"), Guidance(split=1.0, h_end=-9)],
)
def test_a_sample_does_not_depend_on_its_batch(guidance):
    denoiser, guide = networks()
    run = {"steps": 5, "guidance": guidance}
    whole = rgas(denoiser, TIMED, guide, Canvas.blank(9, 6, 7), **run)
    assert len(whole.tokens.unique(dim=0)) > 5
    for i in range(9):
        part = rgas(denoiser, TIMED, guide, Canvas.blank(1, 6, 7, first=i), **run)
        assert torch.equal(part.tokens[0], whole.tokens[i])


# Conditioning


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("select", ["sample", "best"])
def test_given_tokens_and_padding_stay_and_padding_is_never_scored(score, select):
    """What the guide says of padding, be it NaN, changes nothing; what it says of text does."""
    language = OracleLanguage.tiny()
    z = torch.tensor([[3, 1, 3, 2], [3, 3, 0, PAD], [3, 3, PAD, PAD], [0, 1, 2, 0]])
    canvas = Canvas(z.repeat(25, 1), 3, torch.arange(100))
    guidance = Guidance(score=score, select=select, h_start=1.0, h_end=1.0)
    seen = []
    deaf, result, other = (
        rgas(language.denoiser, SCHEDULE, guide, canvas, steps=4, guidance=guidance, callback=call)
        for guide, call in [
            (ToyGuide(3, at_padding=0.0), None),
            (ToyGuide(3), seen.append),
            (ToyGuide(3, seed=4), None),
        ]
    )
    assert torch.equal(result.tokens, deaf.tokens)
    assert not torch.equal(result.tokens, other.tokens)
    given = canvas.tokens != 3
    assert torch.equal(result.tokens[given], canvas.tokens[given])
    assert bool(((result.tokens >= 0) & (result.tokens < 3))[~given].all())
    assert torch.equal(sum(step.revealed.int() for step in seen), (~given).int())
    for step in seen:
        assert torch.equal(step.confidence > 0, (step.tokens != 3) & ~given)


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("select", ["sample", "best"])
def test_what_is_given_is_never_scored(score, select):
    """Of a prompt, or of what fills a window behind its text, a discriminator may say anything."""

    class Loud(ToyGuide):
        def score(self, embedded, z, t):
            return super().score(embedded, z, t) + 50 * torch.randn(z.shape) * given

    language = OracleLanguage.tiny()
    start = torch.tensor([3, 1, 3, 0])
    given, canvas = start != 3, Canvas(start.repeat(100, 1), 3, torch.arange(100))
    run = {"steps": 2, "guidance": Guidance(score=score, select=select, split=0.0)}
    quiet = rgas(language.denoiser, SCHEDULE, ToyGuide(3, scale=3.0), canvas, **run)
    loud = rgas(language.denoiser, SCHEDULE, Loud(3, scale=3.0), canvas, **run)
    assert torch.equal(quiet.tokens, loud.tokens)
    other = rgas(language.denoiser, SCHEDULE, ToyGuide(3, seed=4, scale=3.0), canvas, **run)
    assert not torch.equal(quiet.tokens, other.tokens)


def test_padding_changes_nothing_for_a_network():
    """A sample of length 4 is the same alone and in a batch of longer ones."""
    denoiser, guide = networks()
    alone = Canvas.blank(5, 4, 7)
    padded = torch.cat([alone.tokens, torch.full((5, 2), PAD)], 1)
    mixed = torch.cat([padded, torch.full((2, 6), 7)])
    run = {"steps": 4, "settings": Draw(seed=3)}
    short = rgas(denoiser, TIMED, guide, alone, **run)
    both = rgas(denoiser, TIMED, guide, Canvas(mixed, 7, torch.arange(7)), **run)
    assert torch.equal(both.tokens[:5, :4], short.tokens)


def test_the_same_text_may_be_written_at_other_places():
    """Samples that differ in nothing but where they may write are those that are drawn alone."""
    denoiser, guide = networks()
    allowed = torch.ones(4, 6, dtype=torch.bool)
    allowed[0, :3] = allowed[2, 4:] = False
    z, samples = torch.full((4, 6), 7), torch.arange(4)
    run = {"steps": 3, "guidance": Guidance(h_start=5.0)}
    together = rgas(denoiser, TIMED, guide, Canvas(z, 7, samples, allowed=allowed), **run)
    for i in range(4):
        alone = Canvas(z[:1], 7, samples[i : i + 1], allowed=allowed[i])
        own = rgas(denoiser, TIMED, guide, alone, **run)
        assert torch.equal(own.tokens[0], together.tokens[i])
        assert torch.equal(own.tokens[0] == 7, ~allowed[i])


# Costs


@pytest.mark.parametrize(
    ("steps", "guidance", "disc_calls", "passes"),
    [
        (1, Guidance(split=1.0), 1, (1 + 3) / 64),
        (1, Guidance(split=0.0), 4, 1 / 64 + 4),
        (1, Guidance(), 4, 1 / 64 + 4),
        (2, Guidance(candidates=1), 1, None),
        (2, Guidance(candidates=3), 1 + 3, None),
        (4, Guidance(candidates=3), 2 + 2 * 3, None),
        (10, Guidance(split=0.29, h_start=0.0, h_end=0.0, candidates=2), 8 * 2, None),
        (100, Guidance(), None, None),
    ],
)
def test_counts_are_exact(steps, guidance, disc_calls, passes):
    """Passes count what ran: shared first steps once, none at rest, a backward pass twice."""
    language = OracleLanguage.tiny(slots=6)
    counting = Counting(language, ToyGuide(3))
    canvas = Canvas.blank(64, 12, 3)
    result = rgas(counting, SCHEDULE, counting, canvas, steps=steps, guidance=guidance)
    assert result.nfe == steps
    assert result.passes == pytest.approx(counting.passes / 64)
    if disc_calls is not None:
        assert result.disc_calls == disc_calls
    if passes is not None:
        assert result.passes == pytest.approx(passes)
    assert counting.differentiated + counting.scored <= 64 * result.disc_calls
    assert counting.differentiated <= 64 * len(guidance.scales(steps))
    if guidance.candidates == 1:
        assert counting.scored == 0


def test_tilting_runs_only_samples_that_reveal_something():
    """And one row for all of them if they are equal; output rows for all masks of those."""
    language, canvas = OracleLanguage.tiny(), Canvas.blank(50, 4, 3)
    counting = Counting(language, ToyGuide(3))
    seen = []
    guidance = Guidance(split=1.0)
    result = rgas(
        counting, SCHEDULE, counting, canvas, steps=30, guidance=guidance, callback=seen.append
    )
    rows = outputs = 0
    for before, step in zip([canvas.tokens, *(s.tokens for s in seen[:-1])], seen, strict=True):
        z = before[step.revealed.any(1)]
        z = z[:1] if len(z.unique(dim=0)) == 1 else z
        rows += len(z)
        outputs += int((z == 3).sum())
    assert (counting.denoised, counting.differentiated) == (rows, rows)
    assert counting.outputs == outputs
    assert result.passes == pytest.approx(4 * rows / 50)
    active = torch.stack([step.revealed.any(1) for step in seen])
    assert result.disc_calls == int(active.sum(0).max()) <= 4


def test_a_guide_keeps_no_gradients():
    """Parameters that require them have none afterwards, and the result carries no graph."""
    denoiser, guide = networks()
    assert all(p.requires_grad for p in guide.discriminator.parameters())
    result = rgas(denoiser, TIMED, guide, Canvas.blank(3, 6, 7), steps=4)
    assert result.disc_calls > 0
    for network in (denoiser.network, guide.discriminator):
        assert all(p.grad is None for p in network.parameters())


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 0}, "candidates is 0: use 1"),
        ({"split": 1.5}, "split is 1.5"),
        ({"split": -0.1}, "split is -0.1"),
        ({"split": float("nan")}, "split is nan"),
        ({"h_start": float("inf")}, "h_start is inf"),
        ({"h_end": float("nan")}, "h_end is nan"),
        ({"clamp": 0.0}, "clamp is 0.0"),
        ({"score": "total"}, "`total` is not a guidance.score. Known: sum, mean."),
        ({"select": "worst"}, "`worst` is not a guidance.select. Known: sample, best."),
    ],
)
def test_bad_guidance_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Guidance(**settings)


def test_bad_calls_are_refused():
    language, canvas = OracleLanguage.tiny(), Canvas.blank(2, 4, 3)
    with pytest.raises(UserError, match="steps is 0"):
        rgas(language.denoiser, SCHEDULE, ToyGuide(3), canvas, steps=0)
    with pytest.raises(UserError, match="needs a discriminator"):
        rgas(language.denoiser, SCHEDULE, None, canvas, steps=2)
    with pytest.raises(UserError, match="knows 5 tokens and the denoiser 3"):
        rgas(language.denoiser, SCHEDULE, ToyGuide(5), canvas, steps=2)


@pytest.mark.parametrize(("split", "steps", "tilting"), [(0.5, 5, 2), (0.29, 100, 29), (1, 3, 3)])
def test_the_first_steps_tilt(split, steps, tilting):
    """floor(split * steps) of them, unspoilt by rounding, with h on a line."""
    scales = Guidance(split=split, h_start=1.0, h_end=2.0).scales(steps)
    assert scales == pytest.approx(torch.linspace(1, 2, tilting).tolist())
