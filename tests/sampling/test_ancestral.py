import itertools

import pytest
import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.process.schedule import Cosine, LogLinear
from didi_instruct.sampling.ancestral import ancestral


def exact_law(language, alphas):
    """Law of the sampler by enumeration: sum over reveal orders of products of conditionals."""
    V, L = language.num_tokens, language.length
    states = {(V,) * L: 1.0}
    for alpha_t, alpha_s in itertools.pairwise(alphas):
        chance = (alpha_s - alpha_t) / (1 - alpha_t)
        z = torch.tensor(list(states))
        p = language.denoiser(z).exp()
        following = {}
        for row, (state, mass) in enumerate(states.items()):
            masked = [i for i in range(L) if state[i] == V]
            for flips in itertools.product([False, True], repeat=len(masked)):
                shown = [i for i, flip in zip(masked, flips, strict=True) if flip]
                weight = mass * chance ** len(shown) * (1 - chance) ** (len(masked) - len(shown))
                for tokens in itertools.product(range(V), repeat=len(shown)):
                    new = list(state)
                    probability = weight
                    for i, token in zip(shown, tokens, strict=True):
                        new[i] = token
                        probability *= p[row, i, token].item()
                    if probability:
                        following[tuple(new)] = following.get(tuple(new), 0.0) + probability
        states = following
    return states


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("schedule", [LogLinear(0.0), LogLinear(1e-3), Cosine(0.0)])
def test_the_samples_follow_the_enumerated_law(steps, schedule):
    """Chi-square over all 81 sequences, 80 degrees of freedom; critical value 138 at 6e-5."""
    language = OracleLanguage.tiny()
    n = 20_000
    result = ancestral(
        language.denoiser,
        schedule,
        samples=torch.arange(n),
        length=4,
        steps=steps,
        mask_id=3,
        seed=5,
    )
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    law = exact_law(language, [*schedule.alpha(times).tolist()[:-1], 1.0])
    assert sum(law.values()) == pytest.approx(1)
    expected = torch.zeros(3**4, dtype=torch.float64)
    powers = torch.tensor([27, 9, 3, 1])
    for state, p in law.items():
        expected[int((torch.tensor(state) * powers).sum())] = p
    counts = torch.bincount((result.tokens * powers).sum(1), minlength=81)
    assert ((counts - n * expected) ** 2 / (n * expected)).sum() < 138


def test_one_token_at_a_time_knows_its_exact_probability():
    """With very many steps a path reveals one token at a time: its log-probability is log p(x)."""
    language = OracleLanguage.tiny()
    result = ancestral(
        language.denoiser,
        LogLinear(0.0),
        samples=torch.arange(20),
        length=4,
        steps=4000,
        mask_id=3,
    )
    torch.testing.assert_close(result.log_prob, language.log_prob(result.tokens))


def test_a_sample_does_not_depend_on_its_batch_and_nfe_counts_steps():
    language = OracleLanguage.tiny()
    settings = {"length": 4, "steps": 3, "mask_id": 3, "seed": 1}
    whole = ancestral(language.denoiser, LogLinear(0.0), samples=torch.arange(9), **settings)
    part = ancestral(language.denoiser, LogLinear(0.0), samples=torch.tensor([7]), **settings)
    assert torch.equal(part.tokens[0], whole.tokens[7])
    assert whole.nfe == 3
    assert whole.passes <= 3


def test_steps_below_one_are_refused():
    with pytest.raises(UserError, match="steps is 0"):
        ancestral(None, LogLinear(0.0), samples=torch.arange(1), length=4, steps=0, mask_id=3)
