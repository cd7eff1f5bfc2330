"""Denoisers and guides whose every number can be checked, and a sampler without any cleverness."""

import itertools
from dataclasses import replace
from functools import partial

import torch
from hypothesis import settings
from hypothesis import strategies as st

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.process.masking import interleaved_times, interleaved_turns
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.denoiser import LogitsDenoiser, times_of
from didi_instruct.sampling.draw import DrawOptions, Purpose, invert, law_of, uniforms
from didi_instruct.sampling.plan import reveal_chances, time_grid
from didi_instruct.sampling.state import PAD, Canvas, State

from .enumeration import dense_tilt

law = settings(deadline=None, derandomize=True, database=None, max_examples=60)
"""Of tests that hold for all inputs: the same inputs in every run."""
V, L = 5, 6
MASK = V
LINEAR = LogLinear(0.0)
TINY = OracleLanguage.tiny()
"""3 tokens, 4 positions."""


def random_function(num_tokens=V, length=L, seed=3):
    """Logits (U, L, V) that depend on every token, on the code of masks, on padding and on time."""
    generator = torch.Generator().manual_seed(seed)
    ids = num_tokens + 6
    first = torch.randn(length * ids, 64, generator=generator, dtype=torch.float64)
    second = torch.randn(64, length * num_tokens, generator=generator, dtype=torch.float64)

    def function(z, t):
        shown = torch.nn.functional.one_hot(z.clamp(min=0), ids) * (z != PAD)[..., None]
        hidden = torch.tanh(0.3 * shown.flatten(1).double() @ first + t.double()[:, None])
        return (0.7 * hidden @ second).view(-1, length, num_tokens)

    return function


class Toy(LogitsDenoiser):
    """A denoiser of a function (z, t) -> (U, L, V) that checks and counts what it is asked."""

    def __init__(self, function=None, num_tokens=V, *, every=False, part=None):
        """`every`: any position may be asked. `part`: rows at a time, with impossible columns."""
        super().__init__(self.checked, num_tokens)
        self.function, self.every, self.part = function or random_function(), every, part
        self.asked, self.outputs = [], 0

    @property
    def inputs(self):
        """Rows of all passes."""
        return sum(len(z) for z, _ in self.asked)

    def checked(self, reads, t, at):
        """Logits (R, V): positions that exist, each once, masked and not padding."""
        times = times_of(t, reads)
        assert times.shape == (len(reads),)
        assert times.dtype == torch.float32
        assert bool(((times >= 0) & (times <= 1)).all())
        assert len(at.unique()) == len(at)
        z = reads.tokens
        assert bool((z >= 0).all()), "a network would be shown padding"
        if reads.attended is not None:
            z = torch.where(reads.attended, z, PAD)
        lowest = 0 if self.every else self.num_tokens
        assert bool((z.flatten()[at] >= lowest).all()), "a law is asked where nothing is masked"
        self.asked.append((z.clone(), times))
        self.outputs += len(at)
        return self.function(z, times).flatten(0, 1)[at]

    def logits_in_parts(self, reads, t, at):
        logits = self.checked(reads, t, at)
        if self.part is None:
            return iter([logits])
        return iter(torch.nn.functional.pad(logits, (0, 3), value=-torch.inf).split(self.part))


class ToyGuide:
    """Positions that look at each other and at the time; NaN at padding, which nobody may read."""

    def __init__(self, num_tokens=V, width=5, scale=1.0, seed=3, at_padding=torch.nan):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(num_tokens + 1, width, generator=generator, dtype=torch.float64)
        self.table, self.scale, self.at_padding = table, scale, at_padding
        self.mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
        self.num_tokens, self.embedding = num_tokens, table[:num_tokens]
        self.scored = self.differentiated = 0

    def embed(self, z):
        return self.table[z]

    def score(self, embeddings, z, t):
        """Log-ratios (B, L) of texts with PAD where they are padded."""
        there = (z != PAD)[..., None]
        mean = (embeddings * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        score = (0.5 + 2 * t[:, None]) * ((embeddings @ self.mix) * mean).sum(-1).tanh()
        return (self.scale * score).masked_fill(z == PAD, self.at_padding)

    def vectors(self, columns):
        return torch.nn.functional.pad(self.embedding, (0, 0, 0, columns - self.num_tokens))

    def _score(self, reads, t, embeddings):
        z = reads.tokens if reads.attended is None else reads.tokens.where(reads.attended, PAD)
        return self.score(embeddings, z, torch.full((len(z),), t))

    def log_ratio(self, reads, t):
        self.scored += len(reads)
        return self._score(reads, t, self.embed(reads.tokens))

    def gradient(self, reads, t, mixture, counted):
        assert len(mixture.at) == int(counted.count_nonzero()), "not every mask shows its mixture"
        self.differentiated += len(reads)
        with torch.enable_grad():
            shown = mixture.vectors.detach().double().requires_grad_()
            own = self.embed(reads.tokens)
            embeddings = own.flatten(0, 1).index_copy(0, mixture.at, shown).view_as(own)
            ratio = self._score(reads, t, embeddings)
            return torch.autograd.grad(ratio, shown, counted.to(ratio.dtype))[0]


class Forbidden:
    """A guide that must not be asked."""

    def __getattr__(self, name):
        raise AssertionError("the guide was asked")


def toy_of(language=TINY):
    """A toy that knows the language; padding tells it nothing."""
    return Toy(
        lambda z, t: language.denoiser(torch.where(z == PAD, language.mask_id, z)),
        language.num_tokens,
    )


# Inputs


def start(canvas, callback=None, **options):
    """A batch on its way, drawn by the options of `DrawOptions`."""
    return State(canvas, DrawOptions(**options), callback)


def blank(num, length, mask_id, callback=None, **options):
    """The same from masks alone."""
    return start(Canvas.blank(num, length, mask_id), callback, **options)


@st.composite
def canvases(draw, *, prompts=False, masks=(1,), length=L):
    """Texts given in part, some alike, some padded at the end."""
    batch = draw(st.integers(1, 4))
    token = st.sampled_from([MASK, MASK, MASK, 0, 1, V - 1])
    row = st.lists(token, min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=batch, max_size=batch))
    if draw(st.booleans()):
        rows = [rows[0] if draw(st.booleans()) else [MASK] * length] * batch
    tokens = torch.tensor(rows)
    if prompts:
        tokens[(tokens == MASK).cumsum(1) > 0] = MASK
    if draw(st.booleans()):
        ends = torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
        tokens[torch.arange(length) >= ends[:, None]] = PAD
    first = draw(st.sampled_from([0, 70]))
    stream = draw(st.sampled_from([(), (), (6, 1)]))
    samples = torch.arange(first, first + batch)
    return Canvas(tokens, MASK, samples, stream, draw(st.sampled_from(masks)))


def some_rows(canvas, rows):
    """A canvas of some rows (b,) of another."""
    return replace(canvas, tokens=canvas.tokens[rows], samples=canvas.samples[rows])


# The reference


def by_hand(
    function, schedule, canvas, steps, options, *, grid=None, order="random", greedy_tail=False,
    guidance=None, guide=None,
):  # fmt: skip
    """Ancestral sampling, or Algorithm 2: text by text and step by step, without a plan.

    Returns tokens (B, L), log-probabilities (B,) and evaluations of the guide (B,).
    """
    times = time_grid(grid or "uniform", steps)
    if order == "streams":
        times, turns = interleaved_times(schedule, steps), interleaved_turns(canvas.open, steps)
    chances = reveal_chances(schedule, times)
    scales = guidance.scales(steps) if guidance else [0.0] * steps
    texts, log_prob = canvas.tokens.clone(), torch.zeros(len(canvas.tokens), dtype=torch.float64)
    calls = [0] * len(texts)
    for n, b in itertools.product(range(steps), range(len(texts))):
        z, masked, time = texts[b], (texts[b] == MASK) & canvas.open[b], times[n]
        noise = partial(_noise, canvas, options.seed, b, n)
        h, candidates = (scales[n], 1) if n < len(scales) else (0.0, guidance.candidates)
        hits = [masked & (noise(Purpose.REVEAL, m) < chances[n]) for m in range(candidates)]
        if order == "streams":
            hits = [masked & (turns[b] == n)] * candidates
        if not torch.stack(hits).any():
            continue
        coded = partial(_coded, function, int(noise(Purpose.CODE)[0] * canvas.masks))
        if h:
            calls[b] += 1
            logits = dense_tilt(coded, guide, z[None], MASK, time, h, guidance, masked[None])
        else:
            logits = coded(z[None], torch.tensor([time], dtype=torch.float32))
        laws = law_of(logits[0], options)
        if greedy_tail and n == steps - 1:
            laws = torch.where(laws == laws.amax(-1, keepdim=True), 0.0, -torch.inf)
        following, paths, chosen = z.repeat(candidates, 1), [], 0
        for m, hit in enumerate(hits):
            following[m, hit] = invert(laws[hit], noise(Purpose.TOKEN, m)[hit])
            paths.append(laws[hit].gather(1, following[m, hit][:, None]).sum())
        if candidates > 1:
            calls[b] += candidates
            score = _score(guide, guidance, following, canvas.open[b], times[n + 1])
            chosen = int(score.argmax())
            if guidance.select == "sample":
                chosen = int(invert(score.log_softmax(0)[None], noise(Purpose.SELECT)[:1]))
        texts[b] = following[chosen]
        log_prob[b] += paths[chosen]
    return texts, log_prob, calls


def _noise(canvas, seed, b, n, purpose, m=0):
    """Of text b in step n and of candidate m, the first of which has that of ancestral sampling."""
    stream = (*canvas.stream, purpose, n) if m == 0 else (*canvas.stream, purpose, n, m)
    return uniforms(seed, canvas.samples[b, None], stream, canvas.tokens.shape[1])[0]


def _coded(function, code, z, t):
    return function(z.where(z != MASK, z + code), t)


def _score(guide, guidance, texts, is_open, time):
    """Eq. (11): rewards of candidates, what is given and what is padding left out."""
    ratio = guide.score(guide.embed(texts.clamp(min=0)), texts, torch.full((len(texts),), time))
    counted = is_open.expand_as(texts)
    if guidance.score == "mean":
        counted = counted & (texts == MASK)
    total = torch.where(counted, ratio, 0.0).sum(1)
    return total if guidance.score == "sum" else total / counted.sum(1).clamp(min=1)
