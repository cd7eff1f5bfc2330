"""DiMO: its gradient by enumeration, its start, that training and sampling agree, and one step."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import kstest
from tests.sampling.enumeration import FALSE_ALARM, all_states, index, p_value
from torch.distributions import Categorical, kl_divergence

import didi_instruct as didi
from didi_instruct.config.dimo import NOISE, RANDOM
from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.recipes import load_recipe
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.distillation.dimo import hidden_share, student_loss, token_gradient
from didi_instruct.distillation.mixture import add_masks
from didi_instruct.distillation.rollout import Noise
from didi_instruct.errors import UserError
from didi_instruct.models.checkpoint import save_model
from didi_instruct.models.network import Mixture, all_logits
from didi_instruct.process.masking import before_end
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.dimo import Start, dimo
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas

from .small import Stream, batch_of, make_task, networks_of, settings, small_network
from .tables import MASK, TEXTS, L, V, conditionals, correlated_law, state_index

BETAS = [0.0, 1.0, 0.3, -0.2]


def task_of(dimo=None, changes=None, **options):
    return make_task("dimo", {"dimo": dimo or {}} | (changes or {}), **options)


def part_of(task, step=0):
    return task.method.plan(batch_of(task, step))


def drawn_of(task, part):
    return task.method.draw(part, learns=False)


def begun_of(task, part):
    return task.method.begin(part)


# The gradient


def mixed_kl(log_theta, phi_logits, beta):
    theta, phi = Categorical(logits=log_theta), Categorical(logits=phi_logits)
    return (1 - beta) * kl_divergence(theta, phi) + beta * kl_divergence(phi, theta)


@pytest.mark.parametrize("beta", BETAS)
def test_the_token_gradient_is_that_of_the_mixed_kl(beta):
    """With respect to the logits of φ, by autograd; it sums to 0 over the tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, theta = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_theta = theta.log_softmax(-1)
    expected = torch.autograd.grad(mixed_kl(log_theta, logits, beta).sum(), logits)[0]
    found = token_gradient(logits.detach().log_softmax(-1), log_theta, beta)
    assert torch.allclose(found, expected)
    assert torch.allclose(found.sum(-1), torch.zeros(9).double(), atol=1e-12)


def loss_of(x, last, hidden, log_p, log_phi, log_theta, beta):
    """The student's loss of one text, with the teacher's table (64, L, V)."""
    theta = log_theta[state_index(x.masked_fill(hidden, MASK))][hidden]
    plan, drawn = SimpleNamespace(revealed=last, hidden=hidden), SimpleNamespace(log_p=log_p)
    return student_loss(plan, drawn, log_phi, theta, torch.ones(()), beta)[0]


def outcomes():
    """Every text and everything that may be hidden of it, if not nothing."""
    for x in TEXTS:
        for coins in itertools.product([False, True], repeat=L):
            if any(coins):
                yield x[None], torch.tensor([coins])


@pytest.mark.parametrize("beta", BETAS)
def test_the_expected_gradient_is_that_of_the_divergence_of_one_step(beta):
    """One step from all masks, with every text and every hidden set enumerated.

    Its tokens are independent, so an exact φ is the student's own law whatever c is, and what the
    loss has must be the gradient of E_c of the mixed KL to p_θ(. | c), the law of c held.
    """
    log_theta, share = conditionals(correlated_law()), 0.6
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(L, V, generator=generator, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    expected, found = 0.0, 0.0
    everywhere = torch.ones(1, L, dtype=torch.bool)
    for x, hidden in outcomes():
        chance = log_p[torch.arange(L), x[0]].sum().exp().detach()
        count = int(hidden.sum())
        weight = chance * share**count * (1 - share) ** (L - count)
        log_phi = log_p.detach()[hidden[0]]
        loss = loss_of(x, everywhere, hidden, log_p, log_phi, log_theta, beta)
        found = found + weight * loss
        context = x.masked_fill(hidden, MASK)
        theta = log_theta[state_index(context)[0]][hidden[0]]
        expected = expected + weight * mixed_kl(theta, logits[hidden[0]], beta).sum()
    gradients = [torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (found, expected)]
    assert gradients[1].abs().max() > 0.05
    assert torch.allclose(*gradients, atol=1e-12)


def test_only_what_is_hidden_and_was_just_written_learns():
    log_theta = conditionals(correlated_law())
    last, hidden = torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])
    log_p = torch.randn(2, V, dtype=torch.float64).log_softmax(-1).requires_grad_()
    log_phi = torch.randn(2, V, dtype=torch.float64).log_softmax(-1)
    x = torch.tensor([[0, 1, 2]])
    loss = loss_of(x, last, hidden, log_p, log_phi, log_theta, 0.0)
    gradient = torch.autograd.grad(loss, log_p)[0]
    theta = log_theta[state_index(torch.tensor([MASK, MASK, 2]))][0].exp()
    assert torch.allclose(gradient[0], log_phi[0].exp() - theta)
    assert not gradient[1].any()


@pytest.mark.parametrize("kind", ["arccos", "uniform"])
def test_shares_that_are_hidden_have_their_law(kind):
    """Distribution functions: P(share < s) is s, or 1 - cos(π s / 2)."""
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    share = hidden_share(kind, numbers)
    assert ((share > 0) & (share < 1)).all()
    expected = share if kind == "uniform" else 1 - (math.pi / 2 * share).cos()
    ranks = share.argsort().argsort().double() + 0.5
    assert torch.allclose(ranks / 1000, expected)


def counts_law(kind, length):
    """P(k of `length` positions are hidden), k = 0, 1, ...: binomial, mixed over the shares."""
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    share = numbers if kind == "uniform" else numbers.acos() / (math.pi / 2)
    k = torch.arange(length + 1)
    ways = torch.tensor([math.comb(length, n) for n in k.tolist()], dtype=torch.float64)
    return (ways * share[:, None] ** k * (1 - share[:, None]) ** (length - k)).mean(0)


@pytest.mark.parametrize("kind", ["arccos", "uniform"])
def test_as_much_is_hidden_as_settings_say_and_networks_are_told(kind):
    """How many of 8 positions are hidden has the law of `dimo.remask`, and not the other one's.

    Chi-square of 6,000 texts (stratified, so that a false alarm is rarer than stated); and the
    share hidden is that of the noise level told, 1 - alpha, to five standard errors in each of
    five bins: a false alarm has a chance of 3e-6.
    """
    task = task_of({"remask": kind}, {"train": {"batch_size": 6000}})
    part = part_of(task)
    found = part.hidden.sum(1)
    other = {"arccos": "uniform", "uniform": "arccos"}[kind]
    assert p_value(found, counts_law(kind, 8)) > FALSE_ALARM
    assert p_value(found, counts_law(other, 8)) < FALSE_ALARM
    for low in torch.arange(0, 1, 0.2):
        here = (part.t_context >= low) & (part.t_context < low + 0.2)
        expected = 1 - task.distillation.schedule.alpha(part.t_context[here]).mean()
        share = part.hidden[here].double().mean()
        assert abs(share - expected) < 5 * math.sqrt(0.25 / (here.sum() * 8))


# The start


def test_a_start_has_random_tokens_and_noise_in_their_shares():
    """Chi-square of 40,000 positions; Kolmogorov-Smirnov of 40,000 normal numbers."""
    z = torch.full((5000, 8), 5)
    z[:, 3] = 2
    noise = Noise(1, torch.arange(5000))
    seen = Start(0.4, 0.3).begin(z, 5, 4, noise)
    assert (seen.tokens[:, 3] == 2).all()
    assert torch.equal(seen.unwritten, z == 5)
    law = torch.tensor([0.08] * 5 + [0.6], dtype=torch.float64)
    assert p_value(seen.tokens[seen.unwritten], law) > FALSE_ALARM
    assert seen.normals.shape == (5000, 8, 4)
    assert kstest(seen.normals[:, :2].flatten().numpy(), "norm").pvalue > FALSE_ALARM
    again = Start(0.4, 0.3).begin(z[70:75], 5, 4, Noise(1, torch.arange(70, 75)))
    assert torch.equal(again.tokens, seen.tokens[70:75]), "whatever else is drawn"
    assert torch.equal(again.normals, seen.normals[70:75])


@pytest.mark.parametrize("end", [None, 0, 2, 4])
def test_random_tokens_of_a_start_are_no_ends(end):
    """Of V = 5: each of the others as often, by counting 2,000 evenly spread uniform numbers.

    Without an end nothing is other than it was: token floor(V u) for the number u.
    """
    which = ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000).view(250, 8)
    which[-1, -1] = 1 - 2.0**-53  # the largest there is

    class Even:
        def uniforms(self, count, purpose, k):
            return [torch.zeros_like(which), which][k]

    z = torch.full((250, 8), 5)
    tokens = Start(0.4, 0.0).begin(z, 5, 4, Even(), end).tokens
    counts = [400] * 5 if end is None else [0 if v == end else 500 for v in range(5)]
    assert torch.bincount(tokens.flatten(), minlength=6).tolist() == [*counts, 0]
    assert (tokens.flatten().diff() >= 0).all(), "a function of its own number, in order"
    if end is None:
        assert torch.equal(tokens, (5 * which).floor().long())


def test_noise_is_on_what_is_unwritten_and_keeps_the_scale():
    """sqrt(1 - σ²) e + σ s n at open positions, e elsewhere: what the network then reads."""
    network, start = small_network(), Start(0.4, 0.3)
    z = torch.tensor([[5, 5, 5, 5, 1, 1, 5, 5]] * 3)
    begun = start.begin(z, 5, 16, Noise(1, torch.arange(3)))
    written = z.clone()
    written[:, 0] = 4
    seen = begun.later(written, 5)
    assert (seen.tokens[:, 0] == 4).all()
    assert torch.equal(seen.tokens[:, 1:], begun.tokens[:, 1:])
    table = network.vocab_embed.embedding
    clean = table[seen.tokens]
    noisy = math.sqrt(1 - 0.09) * clean + 0.3 * table.std() * seen.normals
    open_ = written == 5
    expected = torch.where(open_[..., None], noisy, clean)
    sigma, at = torch.full((3,), 0.7), open_.flatten().nonzero().squeeze(1)
    full = all_logits(network, seen.tokens, sigma, mixture=Mixture(None, expected))
    assert torch.allclose(start.logits(network, seen, sigma, at), full[open_], atol=1e-5)
    silent = Start(0.4, 0.0)
    plain = silent.begin(z, 5, 16, Noise(1, torch.arange(3)))
    assert plain.normals is None
    own = network(plain.tokens, sigma)[open_]
    assert torch.allclose(silent.logits(network, plain, sigma, at), own, atol=1e-5)


# Sampling, as in training


class Blind:
    """Two tokens at two positions: a network with a law of its own for everything it may see."""

    config = SimpleNamespace(num_tokens=2, end_id=None)
    vectors = torch.zeros(3, 1)

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.logits = 2 * torch.randn(9, 2, 2, generator=generator, dtype=torch.float64)

    def embed(self, tokens, attended=None, mixture=None):
        return tokens

    def modulations(self, sigma=None):
        return None

    def trunk(self, tokens, mods=None, attended=None):
        return self.logits[index(tokens, 3)]

    def head(self, hidden, mods=None):
        return hidden


def even(steps):
    """Chance of a mask to be revealed in each of some even steps."""
    return [1 / (steps - n) for n in range(steps)]


def enumerated_law(read, random, chances, blind=()):
    """Law of the four texts: over starts, what each step reveals, and what it draws there.

    Step n reveals a mask with probability chances[n], from the laws read(what is shown, n). Steps
    in `blind` are shown the start alone, whatever is written: what must not be.
    """
    starts, texts = all_states(3, 2), all_states(2, 2)
    law = torch.zeros(4, dtype=torch.float64)
    for begun in starts:
        at_start = math.prod(1 - random if v == 2 else random / 2 for v in begun.tolist())
        mass = {(2, 2): at_start}
        for n, chance in enumerate(chances):
            then = {}
            for state, p in mass.items():
                shown = torch.tensor(
                    [
                        b if v == 2 or n in blind else v
                        for v, b in zip(state, begun.tolist(), strict=True)
                    ]
                )
                laws = read(shown, n)
                options = [
                    [(v, 1.0)]
                    if v != 2
                    else [(2, 1 - chance), (0, chance * laws[i][0]), (1, chance * laws[i][1])]
                    for i, v in enumerate(state)
                ]
                for (a, pa), (b, pb) in itertools.product(*options):
                    then[a, b] = then.get((a, b), 0.0) + p * pa * pb
            mass = then
        law += torch.tensor([mass.get(tuple(x.tolist()), 0.0) for x in texts])
    return law / law.sum()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_samples_follow_the_enumerated_law(steps):
    """Chi-square of 20,000 texts; the log-probability is that of the path, given the start."""
    reader, num = Blind(), 20_000
    canvas = Canvas.blank(num, 2, 2)
    start = Start(0.5, 0.0)
    settings = DrawOptions(seed=4)
    drawn = dimo(reader, LogLinear(0.0), canvas, steps=steps, start=start, settings=settings)

    def read(shown, n):
        return reader.logits[index(shown[None], 3)[0]].softmax(-1).tolist()

    law = enumerated_law(read, 0.5, even(steps))
    assert p_value(index(drawn.tokens, 2), law) > FALSE_ALARM
    assert p_value(index(drawn.tokens, 2), enumerated_law(read, 0.0, even(steps))) < FALSE_ALARM
    if steps == 1:
        begun = start.begin(canvas.tokens, 2, 1, Noise(4, canvas.samples))
        log_p = reader.logits[index(begun.tokens, 3)].log_softmax(-1)
        own = log_p.gather(-1, drawn.tokens[..., None]).squeeze(-1).sum(1)
        assert torch.allclose(drawn.log_prob, own)
        assert (drawn.nfe, drawn.passes) == (1, 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_student_trains_on_the_texts_that_the_sampler_draws(noise):
    """8,000 texts of each, of one step: both follow the same law, exactly known without noise.

    With noise two samples are compared, cell by cell, by the same test on pooled frequencies.
    """
    shape, num = {"vocab_size": 3, "length": 2, "eps": 0.0}, 8000
    task = task_of(
        {"random": 0.5, "noise": noise},
        {"train": {"batch_size": num}},
        teacher=small_network(0, **shape),
        student=small_network(1, **shape),
    )
    part = part_of(task)
    trained = index(drawn_of(task, part).x, 2)
    network, schedule = networks_of(task)["student"], task.distillation.schedule
    drawn = dimo(network, schedule, Canvas.blank(num, 2, 2), steps=1, start=task.method.start)
    sampled = index(drawn.tokens, 2)
    if noise:
        from scipy.stats import chi2_contingency

        table = [torch.bincount(cells, minlength=4).tolist() for cells in (trained, sampled)]
        assert chi2_contingency(table).pvalue > FALSE_ALARM
        return

    def read(shown, n):
        return network(shown[None], torch.zeros(1))[0].softmax(-1).tolist()

    law = enumerated_law(read, 0.5, even(1))
    assert p_value(trained, law) > FALSE_ALARM
    assert p_value(sampled, law) > FALSE_ALARM


@pytest.mark.parametrize("walked", [1, 2])
def test_walks_of_several_steps_follow_the_enumerated_law(walked, monkeypatch):
    """Texts of budget 3 that are finished after one step or two, of a student told the time.

    Step n is told 1 - n / 3, that is sigma = -log(1 - (1 - eps)(1 - n / 3)), and shown what is
    written, the start elsewhere. Chi-square of 10,000 texts; laws of steps that are shown the start
    alone, or told another time, are refused.
    """
    generator, num = torch.Generator().manual_seed(7), 30_000  # of which all laws are far apart
    table = 3 * torch.randn(3, 9, 2, 2, generator=generator, dtype=torch.float64)

    def logits(self, network, seen, sigma, at):
        step = 3 * (1 - (1 - (-sigma).exp()) / 0.999)
        assert torch.allclose(step, step.round(), atol=1e-4)
        return table[step.round().long(), index(seen.tokens, 3)].flatten(0, 1)[at]

    monkeypatch.setattr(Start, "logits", logits)
    shape = {"vocab_size": 3, "length": 2}
    task = task_of(
        {"random": 0.5, "noise": 0.0, "budgets": [3]},
        {"train": {"batch_size": num}},
        teacher=small_network(0, **shape),
        student=small_network(1, **shape),
    )
    part = part_of(task)
    here = (part.path.t - (1 - walked / 3)).abs() < 1e-9
    found = index(drawn_of(task, part).x, 2)[here]

    def law(times=(0, 1, 2), blind=()):
        def read(shown, n):
            return table[times[n], index(shown[None], 3)[0]].softmax(-1).tolist()

        return enumerated_law(read, 0.5, [*[1 / 3, 1 / 2][:walked], 1.0], blind)

    assert len(found) == num // 3
    assert p_value(found, law()) > FALSE_ALARM
    wrong = [law((1, 1, 2)), law((0, 0, 2)), law(blind=[1])]
    if walked == 2:
        wrong += [law((0, 1, 1)), law(blind=[2])]
    assert all(p_value(found, other) < FALSE_ALARM for other in wrong)


def test_several_steps_walk_to_a_state_of_the_path_and_finish_it():
    """Of budget 4: what the walk has written stays, and about a quarter per step is written.

    Five standard errors for each of four times: a false alarm has a chance of 2e-6.
    """
    task = task_of({"budgets": [4]}, {"train": {"batch_size": 2000}})
    part = part_of(task)
    drawn = drawn_of(task, part)
    z, last = drawn.z, part.revealed
    assert torch.equal(last, z == 5)
    assert torch.equal(drawn.x[~last], z[~last])
    assert (drawn.x < 5).all()
    assert set(part.path.t.tolist()) == {1.0, 0.75, 0.5, 0.25}
    for t in part.path.t.unique():
        here = part.path.t == t
        share = last[here].double().mean()
        assert abs(share - t) < 5 * math.sqrt(0.25 / (here.sum() * 8))


def test_the_sampler_is_found_by_name(tmp_path):
    """With the start of the recipes, and with options; those that mean nothing are refused."""
    language = OracleLanguage.default()
    network = small_network(vocab_size=language.num_tokens + 1, length=8)
    save_model(tmp_path, network.state_dict(), network.config, tokenizer=language.tokenizer)
    model = didi.load(tmp_path)
    usual = model.draw(6, steps=2, sampler="dimo", seed=1)
    same = model.draw(
        6, steps=2, sampler="dimo", seed=1, batch_size=2, options={"random": RANDOM, "noise": NOISE}
    )
    assert torch.equal(usual.tokens, same.tokens)
    plain = model.draw(6, steps=2, sampler="dimo", seed=1, options={"random": 0, "noise": 0})
    assert not torch.equal(usual.tokens, plain.tokens)
    ancestral = model.draw(6, steps=2, sampler="ancestral", seed=1)
    assert torch.equal(plain.tokens, ancestral.tokens), "nothing random in the start: no difference"
    with pytest.raises(UserError, match="random is 1.5: use 0 or more, below 1"):
        model.draw(1, sampler="dimo", options={"random": 1.5})
    several = add_masks(network, 3, seed=0, spread=1.0)
    save_model(tmp_path / "several", several.state_dict(), several.config)
    with pytest.raises(UserError, match="models with one mask"):
        didi.load(tmp_path / "several").draw(1, sampler="dimo")


# One iteration


@pytest.mark.parametrize("told", [False, True])
def test_the_auxiliary_learns_what_was_hidden_from_what_was_not(told):
    """Its loss is -log p_φ(x^l | c) per hidden position l, c the text with those masked again.

    Both networks read c, and the noise level of its share of masks if they are told the time.
    """
    shape = {"time_conditioning": told}
    task = task_of(
        {"budgets": [1, 3]},
        teacher=small_network(0, **shape),
        student=small_network(1, **shape),
    )
    part = part_of(task)
    x, hidden = drawn_of(task, part).x, part.hidden
    context = torch.where(hidden, 5, x)
    sigma = -(1 - 0.999 * part.t_context).log()
    networks = (networks_of(task)["auxiliary"], task.distillation.teacher.network)
    networks[0].load_state_dict(small_network(2, **shape).state_dict())  # it begins as the teacher
    with torch.no_grad():
        log_phi, log_theta = (n(context, sigma).log_softmax(-1)[hidden] for n in networks)
    tokens = x[hidden]
    nll = -log_phi[torch.arange(len(tokens)), tokens].mean().item()
    numbers = task.step(0)
    assert 0 < hidden.sum() < hidden.numel()
    assert numbers["aux_loss"].item() == pytest.approx(nll, rel=1e-5)
    expected = kl_divergence(Categorical(logits=log_phi), Categorical(logits=log_theta)).mean()
    assert expected > 1e-3
    assert numbers["aux_kl"].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("prompt", [0, 2])
def test_prompts_and_ends_are_given(prompt):
    """Each text has a window of its own, which 0 ends; starts, texts and contexts keep that."""
    own = {"length": 8, "end_id": 0, "lengths": (0, 3, 5, 0, 0, 4, 1, 0, 2)}
    data = Stream()
    task = task_of(
        {"budgets": [1, 2]},
        {"prompt": prompt, "data": {"source": "stream"}},
        teacher=small_network(0, **own),
        student=small_network(1, **own),
        data=data if prompt else None,
    )
    for step in range(3):
        part = part_of(task, step)
        given = part.start != 5
        begun = begun_of(task, part)
        drawn = drawn_of(task, part)
        for z in (begun.tokens, drawn.x):
            assert torch.equal(z[given], part.start[given])
        assert not (part.hidden & given).any()
        if prompt:
            assert torch.equal(part.start[:, :2], data.rows(12 * step, 12)[:, :2])
        assert all(value.isfinite() for value in task.step(step).values())


def test_ends_are_in_no_start_of_training_or_sampling(tmp_path, monkeypatch):
    """Where 0 ends texts: at open positions a mask in 6 of 10, else one of the other four tokens.

    Chi-square of the starts of 2,000 texts each, and none of them has an end before its own.
    """
    own = {"length": 8, "end_id": 0, "lengths": (0, 3, 5, 0, 0, 4, 1, 0, 2)}
    network, law = small_network(1, **own), torch.tensor([0, 0.1, 0.1, 0.1, 0.1, 0.6]).double()
    task = task_of(
        {}, {"train": {"batch_size": 2000}}, student=network, teacher=small_network(**own)
    )
    starts = [begun_of(task, part_of(task))]
    save_model(tmp_path, network.state_dict(), network.config)
    logits = Start.logits

    def spy(self, network, seen, sigma, where):
        starts.append(seen)
        return logits(self, network, seen, sigma, where)

    monkeypatch.setattr(Start, "logits", spy)
    didi.load(tmp_path).draw(2000, steps=1, sampler="dimo", seed=1, batch_size=2000)
    assert len(starts) == 2
    for seen in starts:
        assert torch.equal(before_end(seen.tokens, 0), seen.unwritten)
        assert p_value(seen.tokens[seen.unwritten], law) > FALSE_ALARM


# That it works


def test_one_step_learns_a_law_without_correlations():
    """The teacher's laws do not depend on context: one step can say the same, and comes to.

    The total variation of the auxiliary denoiser from the teacher falls to a third.
    """
    length, steps = 4, 120
    logits = torch.randn(length, 5, generator=torch.Generator().manual_seed(5))

    def log_probs(z, t, where):
        return logits.log_softmax(-1).expand(len(z), -1, -1)[where]

    changes = {
        "train": {"steps": steps, "batch_size": 32, "ema": 0.0},
        "optim": {"lr": 3e-3, "schedule": "linear"},
    }
    shape = {"length": length, "layers": 1, "learned_positions": True}
    task = task_of(
        {"aux_lr": 1e-2, "aux_steps": 2, "random": 0.2, "noise": 0.1},
        changes,
        log_probs=log_probs,
        teacher=small_network(0, **shape),
        student=small_network(1, **shape),
    )
    far = [task.step(step)["tv"].item() for step in range(steps)]
    assert sum(far[-10:]) < sum(far[:10]) / 3
    part = part_of(task)
    law = drawn_of(task, part).log_p.view(32, length, 5).exp().mean(0)
    assert (law - logits.softmax(-1)).abs().sum(-1).mean() / 2 < 0.15


# Settings


def test_settings_that_mean_nothing_are_refused():
    for changes, message in [
        ({"random": 1.0}, "dimo.random is 1.0: use 0 or more, below 1"),
        ({"noise": -0.1}, "dimo.noise is -0.1"),
        ({"budgets": []}, r"dimo.budgets is \[\]: step counts"),
        ({"beta": float("inf")}, "dimo.beta is inf"),
        ({"aux_lr": 0.0}, "dimo.aux_lr is 0.0"),
        ({"aux_steps": 0}, "dimo.aux_steps is 0: use 1 or more"),
        ({"warmup": 10}, "train.steps is 6 and dimo.warmup takes 10"),
    ]:
        with pytest.raises(UserError, match=message):
            settings("dimo", {"dimo": changes})


@pytest.mark.parametrize("name", ["oracle-dimo", "stories-dimo"])
def test_recipes_start_as_the_sampler_does(name):
    config = load_recipe(DistillConfig, name)
    assert (config.method, config.dimo.random, config.dimo.noise) == ("dimo", RANDOM, NOISE)
