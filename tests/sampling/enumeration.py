"""Laws of samplers by enumeration, and whether samples follow them."""

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


def masked_step(language, mass, reveal, remask=0.0, positions=None):
    """Law over all (V + 1)^L states after masks were revealed and tokens masked at `positions`."""
    V, L = language.num_tokens, language.length
    z = all_states(V + 1, L)
    masked = (z == V)[..., None]
    p = torch.nn.functional.pad(language.denoiser(z).exp(), (0, 1))
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


def assert_follows(tokens, law, num_tokens):
    """Texts (n, L) follow a law (V^L,)."""
    assert p_value(index(tokens, num_tokens), law) > FALSE_ALARM
