"""DiMO: its gradient by enumeration, its start, that training and sampling agree, and one step.

Iterations are read from what they ask: the student through its start, the auxiliary denoiser at
what is hidden again, and the texts through what processes gather.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, kstest
from tests.random_models import randomise
from tests.sampling.enumeration import FALSE_ALARM, all_states, index, p_value
from torch.distributions import Categorical, kl_divergence

import didi_instruct as didi
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.methods import DIMO_NOISE, DIMO_RANDOM
from didi_instruct.config.recipes import load_recipe
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.dimo import hidden_share, token_gradient
from didi_instruct.distillation.mixture import add_masks
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.network import Mixture, all_logits
from didi_instruct.process.masking import before_end
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.dimo import Start, dimo
from didi_instruct.sampling.draw import DrawOptions, Noise
from didi_instruct.sampling.state import Canvas, State

from .small import (
    asked_of,
    check,
    gradient_norm,
    law,
    maker,
    networks_of,
    pair,
    run,
    small_network,
    spy,
    twin,
)
from .tables import MASK, TEXTS, L, conditionals, correlated_law, random_logits, state_index

BETAS = [0.0, 1.0, 0.3, -0.2]
WINDOWS = {"length": 8, "end_id": 0, "lengths": (0, 3, 5, 0, 0, 4, 1, 0, 2)}


task_of = maker("dimo")


@pytest.fixture
def step_of(monkeypatch):
    """Do an iteration: its texts x, what is hidden of them, the student's starts and passes."""

    def step(task, number=0):
        passes, logits = [], Start.logits

        def seen(self, network, seen, sigma, at):
            passes.append((seen, sigma, at))
            return logits(self, network, seen, sigma, at)

        with monkeypatch.context() as patch:
            patch.setattr(Start, "logits", seen)
            gathered = spy(task.distillation.world, "gather")
            asked = asked_of(task.parts["auxiliary"], "log_probs")
            numbers = task.step(number)
        seen, sigma, at = passes[-1]
        (x,), context = gathered[0], asked[-1][0]
        last = torch.zeros(x.numel(), dtype=torch.bool).index_fill(0, at, True).view(x.shape)
        return SimpleNamespace(
            numbers=numbers, seen=seen, sigma=sigma, last=last, x=x, context=context,
            t_context=asked[-1][1], hidden=asked[-1][2],
        )  # fmt: skip

    return step


# The gradient


def mixed_kl(log_theta, phi_logits, beta):
    theta, phi = Categorical(logits=log_theta), Categorical(logits=phi_logits)
    return (1 - beta) * kl_divergence(theta, phi) + beta * kl_divergence(phi, theta)


@law
@given(st.floats(-1, 2), st.integers(0, 2**20))
def test_the_token_gradient_is_that_of_the_mixed_kl(beta, seed):
    """With respect to the logits of φ, by autograd; it sums to 0 over the tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits, theta = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_theta = theta.log_softmax(-1)
    expected = torch.autograd.grad(mixed_kl(log_theta, logits, beta).sum(), logits)[0]
    found = token_gradient(logits.detach().log_softmax(-1), log_theta, beta)
    assert torch.allclose(found, expected)
    assert torch.allclose(found.sum(-1), torch.zeros(9).double(), atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_the_expected_gradient_is_that_of_the_divergence_of_one_step(beta):
    """One step from all masks, with every text and every hidden set enumerated.

    Its tokens are independent, so an exact φ is the student's own law whatever c is, and the token
    gradients at hidden positions must add up to the gradient of E_c of the mixed KL to p_θ(. | c),
    the law of c held.
    """
    log_theta, share = conditionals(correlated_law()), 0.6
    logits = random_logits(1)[0].requires_grad_()
    log_p = logits.log_softmax(-1)
    expected, found = 0.0, 0.0
    for x in TEXTS:
        for coins in itertools.islice(itertools.product([False, True], repeat=L), 1, None):
            hidden = torch.tensor(coins)
            count = int(hidden.sum())
            chance = log_p[torch.arange(L), x].sum().exp().detach()
            weight = chance * share**count * (1 - share) ** (L - count)
            theta = log_theta[state_index(x.masked_fill(hidden, MASK))][hidden]
            gradient = token_gradient(log_p.detach()[hidden], theta, beta)
            found = found + weight * (gradient * log_p[hidden]).sum()
            expected = expected + weight * mixed_kl(theta, logits[hidden], beta).sum()
    gradients = [torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (found, expected)]
    assert gradients[1].abs().max() > 0.05
    assert torch.allclose(*gradients, atol=1e-12)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("budgets", [[1], [1, 4]])
def test_an_iteration_by_hand(told, beta, budgets, step_of):
    """Token gradients where both hidden and just written, per hidden position; from whole passes.

    The auxiliary's loss is -log p_φ(x | c), c the text with what is hidden masked again; it and the
    teacher read c, and the noise level of its share of masks if they are told the time.
    """
    networks = pair(time_conditioning=told)
    task = task_of({"budgets": budgets, "beta": beta}, **networks)
    randomise(networks_of(task)["auxiliary"], 5)  # it begins as the teacher
    student, auxiliary = (twin(network) for network in networks_of(task).values())
    found = step_of(task)
    x, hidden, last = found.x, found.hidden, found.last
    assert torch.equal(found.context, x.masked_fill(hidden, 5))
    assert bool((x < 5).all())
    assert last.all() == (budgets == [1])
    sigma = task.distillation.schedule.sigma(found.t_context)
    with torch.no_grad():
        log_phi, log_theta = (network(found.context, sigma).log_softmax(-1)
                              for network in (auxiliary, networks["teacher"]))  # fmt: skip
    count = hidden.sum()
    own = task.method.start.logits(student, found.seen, found.sigma, torch.arange(x.numel()))
    log_p = own.log_softmax(-1).view_as(log_phi)
    both = hidden & last
    gradient = token_gradient(log_phi[both], log_theta[both], beta)
    loss = (gradient * log_p[both]).sum() / count
    phi, theta = (Categorical(logits=each) for each in (log_phi, log_theta))
    path = -log_p.gather(-1, x[..., None]).squeeze(-1)
    expected = {
        "loss": loss, "grad_norm": gradient_norm(loss, student),
        "aux_loss": -phi.log_prob(x)[hidden].mean(),
        "aux_kl": kl_divergence(phi, theta)[hidden].mean(),
        "tv": (phi.probs - theta.probs).clamp(min=0).sum(-1)[hidden].mean(),
        "entropy": Categorical(logits=log_p).entropy()[both].sum() / count,
        "path_entropy": path[last].mean(),
    }  # fmt: skip
    check(found.numbers, abs=1e-7, **expected)


# What is hidden


@pytest.mark.parametrize("kind", ["arccos", "uniform"])
def test_shares_that_are_hidden_have_their_law(kind):
    """Distribution functions: P(share < s) is s, or 1 - cos(π s / 2)."""
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    share = hidden_share(kind, numbers)
    assert ((share > 0) & (share < 1)).all()
    expected = share if kind == "uniform" else 1 - (math.pi / 2 * share).cos()
    ranks = share.argsort().argsort().double() + 0.5
    assert torch.allclose(ranks / 1000, expected)


@pytest.mark.parametrize("kind", ["arccos", "uniform"])
def test_as_much_is_hidden_as_settings_say_and_networks_are_told(kind, step_of):
    """The noise levels told have the law of `dimo.remask`, and texts are hidden to them.

    Kolmogorov-Smirnov of 4,000 levels (stratified, so that a false alarm is rarer than stated); the
    share hidden is that of the level, 1 - alpha, to five standard errors in each of five bins: a
    false alarm has a chance of 3e-6.
    """
    task = task_of({"remask": kind, "noise": 0.0}, {"train": {"batch_size": 4000}})
    found = step_of(task)
    share = 1 - task.distillation.schedule.alpha(found.t_context)
    laws = {"uniform": lambda s: s, "arccos": lambda s: 1 - np.cos(math.pi / 2 * s)}
    assert {k for k, cdf in laws.items() if kstest(share, cdf).pvalue > FALSE_ALARM} == {kind}
    for low in torch.arange(0, 1, 0.2):
        here = (share >= low) & (share < low + 0.2)
        hidden = found.hidden[here].double().mean()
        assert abs(hidden - share[here].mean()) < 5 * math.sqrt(0.25 / (here.sum() * 8))


# The start


def test_a_start_has_random_tokens_and_noise_in_their_shares():
    """Chi-square of 40,000 positions; Kolmogorov-Smirnov of 40,000 normal numbers."""
    z = torch.full((5000, 8), 5)
    z[:, 3] = 2
    noise = Noise(1, torch.arange(5000))
    seen = Start(0.4, 0.3).begin(z, 5, 4, noise)
    assert (seen.tokens[:, 3] == 2).all()
    assert torch.equal(seen.unwritten, z == 5)
    shares = torch.tensor([0.08] * 5 + [0.6], dtype=torch.float64)
    assert p_value(seen.tokens[seen.unwritten], shares) > FALSE_ALARM
    assert seen.normals.shape == (5000, 8, 4)
    assert kstest(seen.normals[:, :2].flatten().numpy(), "norm").pvalue > FALSE_ALARM
    again = Start(0.4, 0.3).begin(z[70:75], 5, 4, Noise(1, torch.arange(70, 75)))
    assert torch.equal(again.tokens, seen.tokens[70:75]), "whatever else is drawn"
    assert torch.equal(again.normals, seen.normals[70:75])


@pytest.mark.parametrize("never", [(), (0,), (2,), (4,), (3, 0), (1, 2, 4)])
def test_random_tokens_of_a_start_may_all_be_drawn(never):
    """Of V = 5: each of the others as often, by counting 2,000 evenly spread uniform numbers."""
    which = ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000).view(250, 8)
    which[-1, -1] = 1 - 2.0**-53  # the largest there is
    even = SimpleNamespace(uniforms=lambda count, purpose, k: [torch.zeros_like(which), which][k])
    tokens = Start(0.4, 0.0).begin(torch.full((250, 8), 5), 5, 4, even, never).tokens
    counts = [0 if v in never else 2000 / (5 - len(never)) for v in range(5)]
    found = torch.bincount(tokens.flatten(), minlength=6).tolist()
    assert found == pytest.approx([*counts, 0], abs=1)
    assert (tokens.flatten().diff() >= 0).all(), "a function of its own number, in order"


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_noise_is_on_what_is_unwritten_and_keeps_the_scale(sigma):
    """sqrt(1 - σ²) e + σ s n at open positions, e elsewhere: what the network then reads."""
    network, start = small_network(), Start(0.4, sigma)
    z = torch.tensor([[5, 5, 5, 5, 1, 1, 5, 5]] * 3)
    begun = start.begin(z, 5, 16, Noise(1, torch.arange(3)))
    written = z.clone()
    written[:, 0] = 4
    seen, open_ = begun.later(written, 5), written == 5
    assert (seen.tokens[:, 0] == 4).all()
    assert torch.equal(seen.tokens[:, 1:], begun.tokens[:, 1:])
    table = network.vocab_embed.embedding
    shown = clean = table[seen.tokens]
    if sigma:
        noisy = math.sqrt(1 - sigma**2) * clean + sigma * table.std() * seen.normals
        shown = torch.where(open_[..., None], noisy, clean)
    time, at = torch.full((3,), 0.7), open_.flatten().nonzero().squeeze(1)
    full = all_logits(network, seen.tokens, time, mixture=Mixture(None, shown.flatten(0, 1)))
    assert torch.allclose(start.logits(network, seen, time, at), full[open_], atol=1e-5)


# Sampling, as in training


def even(steps):
    """Chance of a mask to be revealed in each of some even steps."""
    return [1 / (steps - n) for n in range(steps)]


def enumerated_law(read, random, chances, blind=()):
    """Law of the four texts of two tokens: over starts, reveals, and what each step draws.

    Step n reveals a mask with probability chances[n], from the laws read(what is shown, n). Steps
    in `blind` are shown the start alone, whatever is written: what must not be.
    """
    texts = torch.zeros(4, dtype=torch.float64)
    for begun in all_states(3, 2).tolist():
        mass = {(2, 2): math.prod(1 - random if v == 2 else random / 2 for v in begun)}
        for n, chance in enumerate(chances):
            then = {}
            for state, p in mass.items():
                shown = [
                    b if v == 2 or n in blind else v for v, b in zip(state, begun, strict=True)
                ]
                laws = read(torch.tensor(shown), n)
                options = [
                    [(v, 1.0)] if v != 2 else
                    [(2, 1 - chance), (0, chance * laws[i][0]), (1, chance * laws[i][1])]
                    for i, v in enumerate(state)
                ]  # fmt: skip
                for (a, pa), (b, pb) in itertools.product(*options):
                    then[a, b] = then.get((a, b), 0.0) + p * pa * pb
            mass = then
        texts += torch.tensor([mass.get((a, b), 0.0) for a in (0, 1) for b in (0, 1)])
    return texts / texts.sum()


def tiny_task(count, options, **changes):
    """A task of texts of two of two tokens."""
    shape = {"vocab_size": 3, "length": 2, **changes}
    return task_of({"random": 0.5, **options}, {"train": {"batch_size": count}}, **pair(**shape))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_samples_follow_the_enumerated_law(steps, monkeypatch):
    """Chi-square of 20,000 texts; the log-probability is that of the path, given the start.

    Laws without random tokens, or of steps that are shown the start alone, are refused.
    """
    network, num = small_network(vocab_size=3, length=2), 20_000
    generator = torch.Generator().manual_seed(3)
    table = (2 * torch.randn(9, 2, 2, generator=generator, dtype=torch.float64)).log_softmax(-1)
    monkeypatch.setattr(
        Start, "logits", lambda self, network, seen, sigma, at: (
            table[index(seen.tokens, 3)].flatten(0, 1)[at]
        ),
    )  # fmt: skip
    start, state = Start(0.5, 0.0), State(Canvas.blank(num, 2, 2), DrawOptions(seed=4))
    drawn = dimo(network, LogLinear(0.0), state, steps=steps, start=start)

    def read(shown, n):
        return table[index(shown[None], 3)[0]].exp().tolist()

    found, chances = index(drawn.tokens, 2), even(steps)
    assert p_value(found, enumerated_law(read, 0.5, chances)) > FALSE_ALARM
    assert p_value(found, enumerated_law(read, 0.0, chances)) < FALSE_ALARM
    if steps > 1:
        assert p_value(found, enumerated_law(read, 0.5, chances, [1])) < FALSE_ALARM
        return
    begun = start.begin(torch.full((num, 2), 2), 2, 1, Noise(4, torch.arange(num)))
    own = table[index(begun.tokens, 3)].gather(-1, drawn.tokens[..., None]).squeeze(-1).sum(1)
    assert torch.allclose(drawn.log_prob, own)
    assert (drawn.nfe, drawn.passes) == (1, 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_student_trains_on_the_texts_that_the_sampler_draws(noise, step_of):
    """8,000 texts of each, of one step: two samples compared, cell by cell."""
    num = 8000
    task = tiny_task(num, {"noise": noise}, eps=0.0)
    network, schedule = networks_of(task)["student"], task.distillation.schedule
    state = State(Canvas.blank(num, 2, 2))
    drawn = dimo(network, schedule, state, steps=1, start=task.method.start)
    trained = step_of(task).x
    table = [torch.bincount(index(x, 2), minlength=4).tolist() for x in (trained, drawn.tokens)]
    assert chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("walked", [0, 1, 2])
def test_walks_of_several_steps_follow_the_enumerated_law(walked, monkeypatch, step_of):
    """Texts of budget 3 that are finished after no, one or two steps, of a student told the time.

    Step n is told 1 - n / 3, that is sigma = -log(1 - (1 - eps)(1 - n / 3)), and shown what is
    written, the start elsewhere. Chi-square of 10,000 texts; laws of steps that are shown the start
    alone, or told another time, are refused.
    """
    generator, num = torch.Generator().manual_seed(7), 30_000  # of which all laws are far apart
    table = 3 * torch.randn(3, 9, 2, 2, generator=generator, dtype=torch.float64)
    table.requires_grad_()

    def number(sigma):
        step = 3 * (1 - (1 - (-sigma).exp()) / 0.999)
        assert torch.allclose(step, step.round(), atol=1e-4)
        return step.round().long()

    monkeypatch.setattr(
        Start,
        "logits",
        lambda self, network, seen, sigma, at: table[number(sigma), index(seen.tokens, 3)].flatten(
            0, 1
        )[at],
    )
    task = tiny_task(num, {"noise": 0.0, "budgets": [3]})
    found = step_of(task)
    texts = index(found.x, 2)[number(found.sigma) == walked]

    def enumerated(times=(0, 1, 2), blind=()):
        def read(shown, n):
            return table[times[n], index(shown[None], 3)[0]].softmax(-1).tolist()

        return enumerated_law(read, 0.5, [*[1 / 3, 1 / 2][:walked], 1.0], blind)

    assert len(texts) == num // 3
    assert p_value(texts, enumerated()) > FALSE_ALARM
    wrong = [enumerated((1, 1, 2))]
    if walked:
        wrong += [enumerated((0, 0, 2)), enumerated(blind=[1])]
    if walked == 2:
        wrong += [enumerated((0, 1, 1)), enumerated(blind=[2])]
    assert all(p_value(texts, other) < FALSE_ALARM for other in wrong)


def test_the_sampler_is_found_by_name(tmp_path):
    """With the start of the recipes, and with options; those that mean nothing are refused."""
    language = OracleLanguage.default()
    network = small_network(vocab_size=language.num_tokens + 1, length=8)
    save_model(tmp_path, network.state_dict(), network.config, tokenizer=language.tokenizer)
    model, shared = didi.load(tmp_path), {"steps": 2, "seed": 1}
    usual = model.draw(6, sampler="dimo", **shared).tokens
    options = {"random": DIMO_RANDOM, "noise": DIMO_NOISE}
    same = model.draw(6, sampler="dimo", batch_size=2, options=options, **shared)
    assert torch.equal(usual, same.tokens)
    plain = model.draw(6, sampler="dimo", options={"random": 0, "noise": 0}, **shared).tokens
    assert not torch.equal(usual, plain)
    ancestral = model.draw(6, sampler="ancestral", **shared)
    assert torch.equal(plain, ancestral.tokens), "nothing random in the start: no difference"
    with pytest.raises(UserError, match="random is 1.5: use 0 or more and less than 1"):
        model.draw(1, sampler="dimo", options={"random": 1.5})
    several = add_masks(network, 3, seed=0, spread=1.0)
    save_model(tmp_path / "several", several.state_dict(), several.config)
    with pytest.raises(UserError, match="models with one mask"):
        didi.load(tmp_path / "several").draw(1, sampler="dimo")
    for name in ("oracle-dimo", "stories-dimo"):
        recipe = load_recipe(DistillConfig, name)
        assert (recipe.method, recipe.dimo.random, recipe.dimo.noise) == (
            "dimo",
            DIMO_RANDOM,
            DIMO_NOISE,
        )


def test_ends_are_in_no_start_of_sampling(tmp_path, monkeypatch):
    """Where 0 ends texts; those of training are in `test_windows.py`."""
    network, logits, seen = small_network(1, **WINDOWS), Start.logits, []
    save_model(tmp_path, network.state_dict(), network.config)
    monkeypatch.setattr(Start, "logits", lambda *given: seen.append(given[2]) or logits(*given))
    didi.load(tmp_path).draw(200, steps=1, sampler="dimo", seed=1, batch_size=200)
    (start,) = seen
    assert torch.equal(before_end(start.tokens, 0), start.unwritten)
    assert (start.tokens[start.unwritten] != 5).double().mean() > 0.3


# That it works


def test_one_step_learns_a_law_without_correlations(step_of):
    """The teacher's laws do not depend on context: one step can say the same, and comes to.

    The total variation of the auxiliary denoiser from the teacher falls to a third.
    """
    length, steps = 4, 120
    logits = torch.randn(length, 5, generator=torch.Generator().manual_seed(5))
    task = task_of(
        {"aux_lr": 1e-2, "aux_steps": 2, "random": 0.2, "noise": 0.1},
        {
            "train": {"steps": steps, "batch_size": 32, "ema": 0.0},
            "optim": {"lr": 3e-3, "schedule": "linear"},
        },
        law=lambda z, t: logits.log_softmax(-1).expand(len(z), -1, -1),
        **pair(length=length, layers=1, learned_positions=True),
    )
    far = [numbers["tv"].item() for numbers in run(task, steps)]
    assert sum(far[-10:]) < sum(far[:10]) / 3
    found = step_of(task, steps - 1)
    with torch.no_grad():
        own = task.method.start.logits(
            networks_of(task)["student"], found.seen, found.sigma, torch.arange(32 * length)
        )
    mean = own.softmax(-1).view(32, length, 5).mean(0)
    assert (mean - logits.softmax(-1)).abs().sum(-1).mean() / 2 < 0.15
