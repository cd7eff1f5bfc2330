"""Losses of answers against exact enumerations: nothing is learnt but the answer."""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.random_models import randomise

from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.models.dit import build_model
from didi_instruct.models.network import all_logits
from didi_instruct.process.uniform import nelbo_integrand
from didi_instruct.training.answers import ANSWER, GIVEN, PADDING, make_answer_objective

V, WINDOW = 4, 7
PROMPT, WORDS = [2, 0, 3], [1, 3, 2]
KINDS = {
    "mdlm": {"schedule": ScheduleConfig(eps=0.0)},
    "timed": {"time_conditioning": True},
    "codes": {"masks": 2, "vocab_size": V + 2, "schedule": ScheduleConfig(eps=0.0)},
    "duo": {"kind": "duo", "vocab_size": V, "time_conditioning": True},
    "ar": {"kind": "ar"},
}


def network_of(name):
    """A network of a kind whose weights all matter, in float64."""
    shape = {"layers": 1, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": V + 1}
    config = ModelConfig(**(shape | {"length": WINDOW} | KINDS[name]))
    return randomise(build_model(config)).double().eval()


def row(prompt, answer, length=WINDOW):
    """A row (1, 2, length) with padding behind the answer."""
    parts = [GIVEN] * len(prompt) + [ANSWER] * len(answer)
    padding = [PADDING] * (length - len(parts))
    return torch.tensor([[[*prompt, *answer, *padding], parts + padding]])


def nll_of(network, z, at, target, sigma=None):
    """-log p of a token at a position of the unpadded text z."""
    logits = network(torch.tensor([z]), sigma)[0, at]
    return -logits.log_softmax(-1)[target].item()


def any_order_nelbo(network, prompt, answer):
    """Mean over all orders of revealing the answer, and over its tokens, of their NLL."""
    start, mask, n = len(prompt), network.config.mask_id, len(answer)
    total = 0.0
    for order in itertools.permutations(range(n)):
        z = [*prompt, *[mask] * n]
        for i in order:
            total += nll_of(network, z, start + i, answer[i])
            z[start + i] = answer[i]
    return total / math.factorial(n) / n


def losses(network, masks, rows, *noise):
    objective = make_answer_objective(network.config, masks)
    with torch.no_grad():
        return objective.loss(network, objective.corrupt(rows, *noise)).double()


def random_masking(network, answer, nodes=24):
    """Exact mean of the loss with the paper's masking: a sum over masks, quadrature over times."""
    n, total = len(answer), 0.0
    points, weights = np.polynomial.legendre.leggauss(nodes)
    rows = row(PROMPT, answer)
    for t, weight in zip((points + 1) / 2, weights / 2, strict=True):
        alpha = 1 - (1 - network.config.schedule.eps) * t
        for masked in itertools.product((False, True), repeat=n):
            uniforms = torch.zeros(1, WINDOW)
            for i, hidden in enumerate(masked):
                uniforms[0, len(PROMPT) + i] = 1 - 1e-6 if hidden else 0.0
            chance = math.prod(1 - alpha if hidden else alpha for hidden in masked)
            loss = losses(network, "random", rows, torch.tensor([t]).float(), uniforms)
            total += weight * chance * loss.item()
    return total


@pytest.mark.parametrize("answer", [WORDS, WORDS[:2], WORDS[:1]], ids=len)
def test_counted_masks_have_the_any_order_nelbo_of_the_answer(answer):
    """Exactly: over all counts, and all orders of the numbers that decide what is masked."""
    network, n = network_of("mdlm"), len(answer)
    found = []
    for k, order in itertools.product(range(n), itertools.permutations(range(n))):
        uniforms = torch.rand(1, WINDOW)
        for i, place in enumerate(order):
            uniforms[0, len(PROMPT) + i] = (place + 0.5) / n
        t = torch.tensor([(k + 0.5) / n])
        found.append(losses(network, "count", row(PROMPT, answer), t, uniforms).item())
    expected = any_order_nelbo(network, PROMPT, answer)
    assert np.mean(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("answer", [WORDS, WORDS[:1]], ids=len)
def test_random_masks_have_the_same_expectation(answer):
    network = network_of("mdlm")
    expected = any_order_nelbo(network, PROMPT, answer)
    assert random_masking(network, answer) == pytest.approx(expected, rel=1e-5)


def test_a_network_that_sees_the_time_is_told_one_that_fits_the_count():
    """The loss by counts, over the law of the k-th smallest number, is that of random times.

    Up to alpha_1 = 0.001, which random times leave out.
    """
    network, n, total = network_of("timed"), 2, 0.0
    points, weights = np.polynomial.legendre.leggauss(24)
    rows = row(PROMPT, WORDS[:n])
    for share, weight in zip((points + 1) / 2, weights / 2, strict=True):
        for k in (1, 2):
            density = n * share ** (k - 1) * (1 - share) ** (n - k)
            for masked in itertools.combinations(range(n), k):
                uniforms = torch.zeros(1, WINDOW)
                uniforms[0, len(PROMPT) : len(PROMPT) + n] = (1 + share) / 2
                for place, i in enumerate(masked):
                    uniforms[0, len(PROMPT) + i] = share / (1 + place)
                t = torch.tensor([(k - 0.5) / n])
                loss = losses(network, "count", rows, t, uniforms).item()
                total += weight * density * loss / math.comb(n, k) / n
    assert total == pytest.approx(random_masking(network, WORDS[:n]), rel=3e-3)


def test_one_token_is_always_masked_and_costs_its_nll():
    """By counts there is no variance at all; random times leave it visible in half of the draws."""
    network, answer = network_of("mdlm"), WORDS[:1]
    rows = row(PROMPT, answer).expand(64, -1, -1)
    objective = make_answer_objective(network.config)
    noise = objective.draw(64, torch.Generator().manual_seed(0))
    z = [*PROMPT, network.config.mask_id]
    expected = torch.full((64,), nll_of(network, z, len(PROMPT), answer[0])).double()
    torch.testing.assert_close(losses(network, "count", rows, *noise), expected)
    assert 16 < (losses(network, "random", rows, *noise) == 0).sum() < 48


@pytest.mark.parametrize("masks", ["count", "random"])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_never_noise_and_cost_nothing(name, masks):
    """What is read beside the answers is the text, and every loss lies on an answer."""
    network = network_of(name)
    objective = make_answer_objective(network.config, masks)
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([row(PROMPT[: 1 + n % 3], WORDS[: 1 + n % 2]) for n in range(60)])
    batch = objective.corrupt(rows, *objective.draw(60, generator))
    given = rows[:, 1] != ANSWER
    assert torch.equal(batch["z"][given], rows[:, 0][given])
    assert (rows[:, 1].flatten()[batch["rows"]] == ANSWER).all()
    if name != "ar":
        assert (batch["z"] != rows[:, 0])[~given].any()


@pytest.mark.parametrize("name", KINDS)
def test_padding_changes_nothing(name):
    """A row alone, cut to its text, has the loss that it has beside longer ones."""
    network = network_of(name)
    objective = make_answer_objective(network.config)
    noise = objective.draw(3, torch.Generator().manual_seed(3))
    rows = torch.cat([row(PROMPT, WORDS), row(PROMPT[:1], WORDS), row([], WORDS[:2])])
    together = losses(network, "count", rows, *noise)
    for n, size in enumerate((6, 4, 2)):
        one = losses(network, "count", rows[n : n + 1, :, :size], *(x[n : n + 1] for x in noise))
        torch.testing.assert_close(one, together[n : n + 1])


def test_uniform_noise_is_on_the_answer_and_its_loss_the_integrand_there():
    """Mean over the answer of DUO's integrand, from logits at all positions."""
    network = network_of("duo")
    objective = make_answer_objective(network.config)
    rows = torch.cat([row(PROMPT, WORDS[: 1 + n % 3])[:, :, : 4 + n % 3] for n in (2, 2)])
    noise = objective.draw(2, torch.Generator().manual_seed(1))
    found = losses(network, "count", rows, *noise)
    batch, t = objective.corrupt(rows, *noise), noise[0]
    logits = all_logits(network, batch["z"], objective.schedule.sigma(t))
    levels = objective.schedule.alpha(t)[:, None], objective.schedule.alpha_prime(t)[:, None]
    dense = nelbo_integrand(logits.float(), rows[:, 0], batch["z"], *levels)
    torch.testing.assert_close(found, dense[:, len(PROMPT) :].mean(1).detach().double())


def test_gradients_of_left_to_right_answers_by_hand():
    """Those of the mean over the answer of -log p(token | all before it), prefix by prefix."""
    network, text = network_of("ar"), [*PROMPT, *WORDS]
    objective = make_answer_objective(network.config)
    loss = objective.loss(network, objective.corrupt(row(PROMPT, WORDS)))
    wanted = 0.0
    for place in range(len(PROMPT), len(text)):
        prefix = torch.tensor([[V, *text[:place]]])  # V is the start symbol
        wanted = wanted - network(prefix)[0, -1].log_softmax(-1)[text[place]] / len(WORDS)
    torch.testing.assert_close(loss[0], wanted)
    parameters = list(network.parameters())
    found = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(wanted, parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_codes_of_a_batch_are_shown_by_all_masks_of_a_row():
    network = network_of("codes")
    objective = make_answer_objective(network.config)
    noise = objective.draw(20, torch.Generator().manual_seed(0))
    rows = row(PROMPT, WORDS).expand(20, -1, -1)
    z, code = objective.corrupt(rows, *noise)["z"], noise[2]
    assert set(code.tolist()) == {0, 1}
    masks = z[:, len(PROMPT) : 6]
    assert ((masks < V) | (masks == V + code[:, None])).all()
