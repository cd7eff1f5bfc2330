"""Laws of samplers by enumeration, and whether samples follow them."""

import itertools

import torch
from scipy.stats import chisquare

FALSE_ALARM = 1e-5
"""Probability that correct code fails one of these tests; seeds are fixed, so once for all."""


def all_states(num: int, length: int) -> torch.Tensor:
    """Every sequence of `length` numbers below `num`, in the order of `index`."""
    return torch.cartesian_prod(*[torch.arange(num)] * length).view(-1, length)


def index(tokens: torch.Tensor, num: int) -> torch.Tensor:
    """Place of sequences in `all_states`."""
    powers = num ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(1)


def independent_step(mass: torch.Tensor, laws: torch.Tensor) -> torch.Tensor:
    """Law after a step in which, given the state, positions move independently.

    Shapes: mass (S,), laws (S, L, K) -> (S,), with S = K^L.
    """
    joint = mass[:, None]
    for law in laws.unbind(1):
        joint = (joint[:, :, None] * law[:, None, :]).flatten(1)
    return joint.sum(0)


def masked_step(language, mass, reveal, remask=0.0, positions=None, p=None):
    """Law over all (V + 1)^L states after masks were revealed and tokens masked at `positions`.

    Tokens are drawn from p (S, L, V), by default the language's own law.
    """
    V, L = language.num_tokens, language.length
    z = all_states(V + 1, L)
    masked = (z == V)[..., None]
    p = torch.nn.functional.pad(language.denoiser(z).exp() if p is None else p, (0, 1))
    mask = torch.nn.functional.one_hot(torch.tensor(V), V + 1).double()
    stay = torch.nn.functional.one_hot(z, V + 1).double()
    laws = torch.where(masked, reveal * p + (1 - reveal) * mask, (1 - remask) * stay)
    laws = laws + torch.where(masked, 0.0, remask * mask)
    if positions is not None:
        laws[:, ~positions] = stay[:, ~positions]
    return independent_step(mass, laws)


def all_masked(language):
    """Law that starts from masks alone."""
    V, L = language.num_tokens, language.length
    mass = torch.zeros((V + 1) ** L, dtype=torch.float64)
    mass[-1] = 1.0
    return mass


def texts_of(mass, num_tokens, length):
    """Law over the V^L texts of a law over all states, when nothing is masked any more."""
    z = all_states(num_tokens + 1, length)
    texts = mass[(z < num_tokens).all(1)]
    torch.testing.assert_close(texts.sum(), torch.ones((), dtype=torch.float64))
    return texts


def ancestral_law(language, schedule, steps):
    """Law over texts of ancestral sampling along a uniform grid, to alpha = 1."""
    alphas = schedule.alpha(torch.linspace(1, 0, steps + 1, dtype=torch.float64)).tolist()
    mass = all_masked(language)
    for alpha_t, alpha_s in itertools.pairwise([*alphas[:-1], 1.0]):
        mass = masked_step(language, mass, (alpha_s - alpha_t) / (1 - alpha_t))
    return texts_of(mass, language.num_tokens, language.length)


def dense_tilt(function, guide, z, mask_id, t, h, guidance, masked=None):
    """Eq. (10) by autograd through softmax(logits) @ E, at every position: (B, L, V).

    `masked` (B, L): masks that are to be written; others show the guide a mask.
    """
    clamp = guidance.clamp
    masked = z == mask_id if masked is None else masked
    times = torch.full((len(z),), t)
    with torch.enable_grad():
        logits = function(z, times).detach().requires_grad_()
        soft = logits.softmax(-1) @ guide.embedding.detach()
        shown = guide.embed(z.clamp(min=0)).detach()
        embeddings = torch.where(masked[..., None], soft, shown)
        ratio = guide.score(embeddings, z, times)
        reward = sum(
            row[where].sum() / (int(where.sum()) if guidance.reward == "mean" else 1)
            for row, where in zip(ratio, masked, strict=True)
            if where.any()
        )
        (gradient,) = torch.autograd.grad(reward, logits)
    return (logits + h * gradient.clamp(-clamp, clamp)).detach()


def law_of_tilting(language, guide, guidance, steps):
    """Law over texts of the tilted sampler, alpha = 1 - t: tokens from `dense_tilt`."""
    V, L = language.num_tokens, language.length
    mass, z = all_masked(language), all_states(V + 1, L)
    for n, h in enumerate(guidance.scales(steps)):
        p = dense_tilt(language.denoiser, guide, z, V, 1 - n / steps, h, guidance)
        mass = masked_step(language, mass, 1 / (steps - n), p=p.softmax(-1))
    return texts_of(mass, V, L)


def law_of_reranking(language, guide, guidance, steps):
    """Law over texts with M = 2 and alpha = 1 - t: all pairs of candidates, weighed by Eq. (11)."""
    V, L = language.num_tokens, language.length
    mass, z = all_masked(language), all_states(V + 1, L)
    masked = z == V
    for n in range(steps):
        times = torch.full((len(z),), 1 - (n + 1) / steps)
        ratio = guide.score(guide.embed(z), z, times).detach().double()
        reward = ratio.sum(1)
        if guidance.score == "mean":
            reward = (ratio * masked).sum(1) / masked.sum(1).clamp(min=1)
        lead = reward[:, None] - reward
        first = (lead >= 0).double() if guidance.select == "best" else lead.sigmoid()
        following = torch.zeros_like(mass)
        for state in mass.nonzero():
            law = masked_step(language, torch.zeros_like(mass).index_fill(0, state, 1.0),
                              1 / (steps - n))  # fmt: skip
            pairs = mass[state] * law[:, None] * law
            following += (pairs * first).sum(1) + (pairs * (1 - first)).sum(0)
        mass = following
    return texts_of(mass, V, L)


def p_value(places, law):
    """Chi-square test that numbers (n,) follow a law (K,); cells below 5 are pooled."""
    counts = torch.bincount(places, minlength=len(law)).double()
    assert not counts[law == 0].any(), "something impossible was drawn"
    expected = len(places) * law
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    return chisquare(observed[kept], expected[kept] * len(places) / expected.sum()).pvalue


def follows(tokens, law, num_tokens):
    """Whether texts (n, L) may follow a law (V^L,)."""
    return p_value(index(tokens, num_tokens), law) > FALSE_ALARM


def assert_follows(tokens, law, num_tokens):
    """Texts (n, L) follow a law (V^L,)."""
    assert follows(tokens, law, num_tokens)
