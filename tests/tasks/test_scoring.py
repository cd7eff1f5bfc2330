"""Likelihoods of answers: exact where they claim to be, bounds with the right expectation."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from tests.tasks.tiny_models import LENGTH, V, tiny

from didi_instruct.model import Model
from didi_instruct.process import uniform
from didi_instruct.tasks.baselines import untrained
from didi_instruct.tasks.encoding import Encoded
from didi_instruct.tasks.scoring import Scorer, subsets

PROMPT = [1, 3, 2]
SIGMAS = 5.0
"""A mean of independent draws lies farther from its expectation in 6 of 10^7 seeds."""
MASKED = ["masked", "masks", "timed", "windows"]


def denoised(model, tokens, t=1.0):
    """p(token | the rest) at every position, the mean over a model's masks: (L, V)."""
    config = model.config
    window = tokens + [config.end_id] * (LENGTH - len(tokens)) if config.end_id == 0 else tokens
    laws = []
    for code in range(config.masks):
        z = torch.tensor([[x + code if x == config.mask_id else x for x in window]])
        laws.append(model.denoiser(z, t)[0].double().softmax(-1))
    return torch.stack(laws).mean(0)


def one_token(model, prompt=PROMPT, **settings):
    """Log-probability of every token behind a prompt."""
    choices = [Encoded(prompt, [token]) for token in range(model.config.num_tokens)]
    return Scorer(model, **settings).choices([choices], ["key"])[0]


@pytest.mark.parametrize("kind", MASKED)
def test_a_masked_models_answer_of_one_token_is_its_exact_conditional(kind):
    model = tiny(kind)
    expected = denoised(model, [*PROMPT, model.mask_id])[len(PROMPT)]
    found = one_token(model).exp()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert found.max() > 1.2 / V, "the law is not flat, so that a wrong one would show"


def test_a_masked_lm_reads_the_answer_between_its_special_tokens(tmp_path):
    model = tiny("bert", tmp_path)
    words = [model.tokenizer.vocabulary[word] for word in ("w1", "w4", "w2")]
    expected = denoised(model, [*words, model.mask_id])[len(words)]
    choices = [Encoded(words, [model.tokenizer.vocabulary[f"w{n}"]]) for n in range(9)]
    longer = [Encoded(words * 3, [words[0]]), Encoded(words * 3, [words[1]])]
    found = Scorer(model).choices([choices, longer], ["a", "b"])[0].exp()
    mine = expected[[choice.answer[0] for choice in choices]]
    torch.testing.assert_close(found, mine, atol=1e-6, rtol=1e-5)
    [noise] = Scorer(untrained(model)).choices([choices], ["a"])
    assert bool(noise.isfinite().all())
    assert float((noise - noise[0]).abs().max()) > 1e-3, "its weights are noise, not zeros"


def test_an_ar_models_answers_are_those_of_all_texts():
    """p(answer | prompt) from the probabilities of whole texts, by enumeration."""
    model = tiny("ar")
    texts = torch.cartesian_prod(*[torch.arange(V)] * 2)
    whole = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    joint = model.network.log_prob(whole).double().detach()
    joint = joint - joint.logsumexp(0)
    pairs = [Encoded(PROMPT, text.tolist()) for text in texts]
    scorer = Scorer(model)
    assert scorer.exact
    torch.testing.assert_close(
        scorer.answers(pairs, ["key"] * len(pairs)), joint, atol=1e-5, rtol=1e-5
    )
    first = joint.view(V, V).logsumexp(1)
    torch.testing.assert_close(one_token(model), first, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MASKED)
def test_the_bound_is_the_mean_over_all_orders_of_writing(kind):
    """E_k (n / k) of the masked tokens' cost is that of the chain rule in a random order."""
    model, answer = tiny(kind), [4, 1, 2]
    total = 0.0
    for order in itertools.permutations(range(3)):
        for done in range(3):
            row = [*PROMPT, *answer]
            for place in order[done:]:
                row[len(PROMPT) + place] = model.mask_id
            t = float(model.schedule.time(torch.tensor(done / 3, dtype=torch.float64)))
            law = denoised(model, row, t)
            total += float(law[len(PROMPT) + order[done], answer[order[done]]].log()) / 6
    [found] = Scorer(model, draws=7).answers([Encoded(PROMPT, answer)], ["key"]).tolist()
    assert found == pytest.approx(total, abs=1e-5)
    one = Scorer(model, draws=1).answers([Encoded(PROMPT, [4])], ["key"])
    assert float(one) == pytest.approx(float(one_token(model)[4]), abs=1e-6)


class Listed:
    """Gives the numbers it was told to give."""

    def __init__(self, stratum, numbers):
        self.stratum, self.numbers = stratum, numbers

    def random(self, shape):
        if isinstance(shape, int):
            return np.full(shape, self.stratum)
        return np.repeat(np.array(self.numbers)[:, None], shape[1], 1)


@pytest.mark.parametrize(("n", "draws"), [(3, 1), (3, 2), (4, 3), (4, 5)])
def test_stratified_draws_are_unbiased(n, draws):
    """Expected weight of each set of masked positions, over all that the noise can be.

    Within a cell of width 1 / (n · 60) the number of masked tokens does not change, since
    60 is a multiple of every number of draws here.
    """
    found, cells = Counter(), n * 60
    for cell, order in itertools.product(range(cells), itertools.permutations(range(n))):
        noise = Listed((cell + 0.5) / cells, order)
        for chosen, weight in subsets(n, draws, noise):
            found[tuple(chosen)] += weight / cells / math.factorial(n)
    assert len(found) == 2**n - 1
    for chosen, weight in found.items():
        k = len(chosen)
        assert weight == pytest.approx(1 / (k * math.comb(n, k))), chosen


def test_with_enough_draws_there_is_no_noise():
    listed = {tuple(c): w for c, w in subsets(4, 15, np.random.default_rng(0))}
    expected = {
        chosen: 1 / (k * math.comb(4, k))
        for k in range(1, 5)
        for chosen in itertools.combinations(range(4), k)
    }
    assert listed == pytest.approx(expected)


def test_a_uniform_state_models_answer_is_the_mean_over_its_noise():
    """Its expectation is the law of one step from t = 1, by enumeration of the noisy token."""
    model, keys = tiny("duo"), 500
    laws = [model.denoiser(torch.tensor([[*PROMPT, z]]), 1.0)[0, -1].softmax(-1) for z in range(V)]
    expected = torch.stack(laws).double().mean(0)
    choices = [Encoded(PROMPT, [token]) for token in range(V)]
    found = Scorer(model, draws=2).choices([choices] * keys, [str(k) for k in range(keys)])
    p = torch.stack(found).exp()
    error = p.std(0) / math.sqrt(keys)
    assert bool(((p.mean(0) - expected).abs() < SIGMAS * error).all())
    assert bool((torch.stack(laws).std(0) > 0).all()), "the noisy token matters"


def test_a_uniform_state_models_bound_has_the_expectation_of_its_nelbo():
    """Mean over keys against the integral over t and the sum over all noisy answers."""
    model, answer, keys = tiny("duo"), [4, 1], 600
    states = torch.cartesian_prod(*[torch.arange(V)] * 2)
    times = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    x, total = torch.tensor(answer).expand(len(states), -1), 0.0
    for t in times:
        alpha = model.schedule.alpha(t).reshape(1, 1)
        chance = (1 - alpha) / V + alpha * (states == x)
        z = torch.cat([torch.tensor(PROMPT).expand(len(states), -1), states], 1)
        logits = model.denoiser(z, float(t))[:, len(PROMPT) :]
        slope = model.schedule.alpha_prime(t).reshape(1, 1)
        cost = uniform.nelbo_integrand(logits, x, states, alpha, slope).sum(1)
        total += float((chance.prod(1) * cost).sum()) / len(times)
    pairs = [Encoded(PROMPT, answer)] * keys
    found = -Scorer(model, draws=4).answers(pairs, [str(k) for k in range(keys)])
    assert abs(float(found.mean()) - total) < SIGMAS * float(found.std()) / math.sqrt(keys)


@pytest.mark.parametrize("kind", [*MASKED, "duo", "ar"])
def test_an_answer_does_not_depend_on_its_batch(kind):
    """Padding is not attended, and noise belongs to the question."""
    model = tiny(kind)
    lengths, generator = [1, 5, 3, 2, 4], torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, V, (n,), generator=generator).tolist() for n in lengths]
    pairs = [Encoded(prompt, [4, 2, 3, 1]) for prompt in prompts]
    keys = [str(n) for n in range(len(pairs))]
    alone = [
        float(Scorer(model, draws=3).answers([pair], [key]))
        for pair, key in zip(pairs, keys, strict=True)
    ]
    together = Scorer(model, draws=3).answers(pairs, keys).tolist()
    few = Scorer(model, draws=3, batch_tokens=2 * LENGTH).answers(pairs[::-1], keys[::-1])
    assert together == pytest.approx(alone, abs=1e-4)
    assert few.tolist()[::-1] == pytest.approx(alone, abs=1e-4)
    other = Scorer(model, draws=3, seed=1).answers(pairs, keys).tolist()
    assert (other == pytest.approx(alone, abs=1e-4)) == (kind == "ar")


def test_choices_of_a_question_share_their_noise():
    """Equal choices are equally likely, though their positions are drawn."""
    model = tiny("masked")
    pair, longer = Encoded(PROMPT, [4, 2, 3, 1]), Encoded(PROMPT, [4, 2, 3, 1, 1])
    scorer = Scorer(model, draws=3)
    found = scorer.choices([[pair, longer, pair], [pair, longer]], ["a", "b"])
    assert found[0][0] == pytest.approx(float(found[0][2]), abs=1e-6)
    assert found[0][0] != pytest.approx(float(found[1][0]), abs=1e-6)
    assert len(found[1]) == 2


def test_damaged_weights_are_refused():
    model = tiny("masked")
    with torch.no_grad():
        model.network.vocab_embed.embedding.fill_(float("nan"))
    model = Model(model.network, model.config)
    with pytest.raises(ValueError, match="weights are damaged"):
        one_token(model)
