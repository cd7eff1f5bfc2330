"""Texts with windows of their own: where they start, ends that stay, losses of the text alone."""

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation.losses import kl
from didi_instruct.distillation.methods import METHODS
from didi_instruct.distillation.rollout import Starts
from didi_instruct.errors import UserError
from didi_instruct.models import discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.process.masking import LengthLaw, before_end
from didi_instruct.sampling.draw import Noise

from .small import (
    END,
    LENGTHS,
    STATE,
    WINDOW,
    Documents,
    make_task,
    networks_of,
    run,
    spy,
    weights,
    windowed_network,
)

L, MASK = WINDOW, 5
PROMPT = {"prompt": 2, "data": {"source": "documents"}}
KNOWING = [method for method in METHODS if method != "duo"]
"""Methods that know windows: of masks."""


@pytest.fixture(autouse=True)
def _quick_heads(monkeypatch):
    """Fifteen power iterations of a fresh head take longer than a whole step of these networks."""
    monkeypatch.setattr(discriminator, "INITIAL_ITERATIONS", 1)


def task_of(method, changes=None, **options):
    nets = {"teacher": windowed_network(0), "student": windowed_network(1)} | options
    return make_task(method, changes, **nets)


# Where texts start


def starts_of(prompt=0, lengths=(0, 3, 5, 0, 0, 4, 1)):
    return Starts(ModelConfig(vocab_size=6, length=L, end_id=END, lengths=lengths), L, prompt)


def test_lengths_follow_the_teachers_law_and_belong_to_their_texts():
    """Chi-square of 20,000 lengths against the law; each length is there once."""
    law, starts = LengthLaw((0, 3, 5, 0, 0, 4, 1)), starts_of()
    start, owner = starts(Noise(3, torch.arange(20_000)))
    assert len(start) == 6
    rows = start[owner]
    masks = rows == MASK
    assert torch.equal(masks, masks.cummin(1).values), "no mask behind an end"
    assert torch.equal(rows[~masks], torch.full_like(rows[~masks], END))
    lengths = masks.sum(1)
    assert p_value(lengths, law.log_prob(torch.arange(7)).exp()) > FALSE_ALARM
    some, which = starts(Noise(3, torch.arange(100, 130)))
    assert torch.equal(some[which], rows[100:130]), "whatever else is drawn"
    assert torch.allclose(starts.log_prob(rows), law.log_prob(lengths))


def test_a_group_has_one_length():
    starts, noise = starts_of(), Noise(3, torch.arange(30, 60))
    start, owner = starts(noise, group=3)
    assert torch.equal(owner, owner[::3].repeat_interleave(3))
    alone, which = starts(noise.of_groups(3))
    assert torch.equal(start[owner[::3]], alone[which])


def test_a_prompt_and_its_own_end_are_given():
    rows = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 1, 2], [1, 2, 0, 0, 0, 0], [0] * 6])
    given = [[1, 2, 5, 5, 0, 0], [1, 2, 5, 5, 5, 5], [1, 2, 0, 0, 0, 0], [0] * 6]
    starts = starts_of(prompt=2)
    start, owner = starts(Noise(0, torch.arange(8)), rows)
    assert start.tolist() == given
    assert owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert starts.log_prob(start).tolist() == [0, 0, 0, 0], "nothing was drawn"
    assert torch.equal(starts.open(rows), start == MASK)


def test_texts_that_fill_their_windows_share_one_row():
    starts = Starts(ModelConfig(vocab_size=6, length=8), 8, 0)
    start, owner = starts(Noise(0, torch.arange(5)))
    assert starts.shared
    assert start.tolist() == [[5] * 8]
    assert owner.tolist() == [0] * 5
    whole = Starts(ModelConfig(vocab_size=6, length=3), 3, 1)
    assert whole.open(torch.tensor([[1, 0, 3]])).tolist() == [[0, 1, 1]]


# Ends and prompts stay


CHANGES = {
    "didi": ("didi", {}),
    "didi, state": ("didi", {"didi": STATE | {"rollout_steps": 2}}),
    "didi, one step": ("didi", {"didi": {"score_decomposition": False}}),
    "matching": ("token-matching", {"token_matching": {"anchor": 0.5}}),
    "matching, contexts": ("token-matching", {"token_matching": {"contexts": 3}}),
    "mixture": ("mixture", {}),
    "mixture, streams": ("mixture", {"order": "streams", "mixture": {"random": 0.5}}),
    "sdtt": ("sdtt", {}),
    "dimo": ("dimo", {"dimo": {"budgets": [1, 3]}}),
}


@pytest.mark.parametrize("texts", ["drawn", "data", "prompts", "prompts of data"])
@pytest.mark.parametrize("name", CHANGES)
def test_no_network_ever_reads_a_changed_end_or_prompt(name, texts):
    """Of every state that student, teacher, auxiliary or discriminator read in an iteration.

    A text has 1, 3 or 5 tokens before its ends, so no end was written over or masked; with prompts
    the first two are known and tell the length. Each of these lengths is met.
    """
    method, changes = CHANGES[name]
    data = Documents() if texts != "drawn" else None
    options = {"references": data.rows} if texts in ("data", "prompts of data") else {}
    if "prompts" in texts:
        changes = changes | PROMPT
        options["data"] = data
    task = task_of(method, changes, **options)
    networks = {"frozen": task.distillation.teacher.network, **networks_of(task)}
    if method == "didi":
        networks["discriminator"] = networks["discriminator"].trunk
    reads = {who: spy(network, "embed") for who, network in networks.items()}
    run(task, 3)
    known = {tuple(row) for row in Documents().rows(0, 12)[:, :2].tolist()}
    for network, calls in reads.items():
        assert calls or network in ("frozen", "teacher"), network
        for tokens, *_ in calls:
            written = tokens != END
            lengths = written.sum(1)
            assert torch.equal(written, torch.arange(L) < lengths[:, None])
            assert set(lengths.tolist()) <= {1, 3, 5}
            if "prompts" in texts:
                assert {tuple(row) for row in tokens[:, :2].tolist()} <= known
                told = 1 + 2 * ((tokens[:, 1] - tokens[:, 0] - 1) % 4)
                assert torch.equal(lengths, torch.where(tokens[:, 1] == END, 1, told))
        if calls:
            every = torch.cat([(tokens != END).sum(1) for tokens, *_ in calls])
            assert set(every.tolist()) >= {3, 5}, network


def test_a_teachers_texts_have_the_lengths_of_its_law():
    """And no end is written inside a text. The mean of 2,000 is 0.2 off at most: 5 errors, 6e-7."""
    texts = task_of("mixture").distillation.teacher_texts(0, 2000)
    clean = before_end(texts, END)
    assert (texts[~clean] == END).all()
    assert int((texts == MASK).sum()) == 0
    counts = torch.arange(1, len(LENGTHS))
    mean = (counts * LengthLaw(LENGTHS).log_prob(counts).exp()).sum().item()
    assert clean.sum(1).double().mean().item() == pytest.approx(mean, abs=0.2)


# A window is worth its text


@pytest.fixture
def _unseen_ends(monkeypatch):
    """Networks that do not look at ends, so that a text is the same with and without them."""
    embed, trunk, seen = DiT.embed, DiT.trunk, []

    def remembered(self, tokens, *given, **more):
        seen.append(tokens != END)
        return embed(self, tokens, *given, **more)

    def blind(self, x, mods=None, attended=None, start=0, stop=None):
        return trunk(self, x, mods, seen.pop(), start, stop)

    monkeypatch.setattr(DiT, "embed", remembered)
    monkeypatch.setattr(DiT, "trunk", blind)


TWICE, CONTEXTS = {"aux_steps": 2}, {"contexts": 3, "completion": 1.0}
"""Before its first update the auxiliary denoiser is the teacher, and nothing is to be learnt."""
WHOLE = {"trainable_blocks": None}
"""A discriminator that is read by whole passes, which do not look at ends here."""
CASES = {
    "didi": ("didi", {"discriminator": WHOLE}),
    "didi, masked": ("didi", {"discriminator": WHOLE | {"positions": "masked"}}),
    "didi, state": ("didi", {"discriminator": WHOLE, "didi": STATE | {"log_prob": "sum"}}),
    "matching": ("token-matching", {"token_matching": TWICE | {"anchor": 0.3}}),
    "matching, contexts": ("token-matching", {"token_matching": TWICE | CONTEXTS}),
    "mixture": ("mixture", {}),
    "sdtt": ("sdtt", {}),
    "dimo": ("dimo", {"dimo": TWICE | {"noise": 0.0, "random": 0.0, "budgets": [1, 3]}}),
}


@pytest.mark.usefixtures("_unseen_ends")
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_windows_is_the_step_on_their_texts(name):
    """Texts of 4 tokens in windows of 6: every number and gradient of a model whose texts fill 4.

    Other lengths have a chance of 1e-11.
    """
    method, changes = CASES[name]
    always = {"length": L, "end_id": END, "lengths": (0, 0, 0, 0, 10**12, 0, 0)}
    found = []
    for shape in (always, {"length": 4}):
        nets = [windowed_network(seed, ends=False, **shape) for seed in (0, 1)]
        batch = {"train": {"batch_size": 24}}
        task = task_of(method, changes | batch, teacher=nets[0], student=nets[1])
        numbers = {k: v.item() for k, v in task.step(0).items()}
        # The first moment is a sum of clipped gradients.
        found.append((numbers, {n: t for n, t in task.tensors().items() if "exp_avg/" in n}))
    (numbers, moments), (alone, expected) = found
    assert numbers.keys() == alone.keys()
    for key, value in alone.items():
        assert numbers[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert moments.keys() == expected.keys()
    assert max(float(t.abs().max()) for n, t in moments.items() if "student" in n) > 0.01
    for key, value in expected.items():
        assert torch.allclose(moments[key], value, rtol=1e-3, atol=1e-5), key


def test_the_kl_at_the_start_is_per_token_of_windows_from_short_to_long():
    task = task_of("didi")
    numbers = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    terms = []
    for n in LengthLaw(LENGTHS).draw(numbers).tolist():
        z = torch.tensor([[MASK] * n + [END] * (L - n)])
        sigma = task.distillation.schedule.sigma(torch.ones(1))
        laws = [windowed_network(seed)(z, sigma)[0, :n].log_softmax(-1) for seed in (0, 1)]
        terms.append(kl(*laws))
    expected = torch.cat(terms).mean().item()
    assert task.distillation.kl_at_start().item() == pytest.approx(expected, rel=1e-4)


# Nothing to write, and what does not fit


@pytest.mark.parametrize("method", KNOWING)
def test_texts_no_longer_than_their_prompts_are_harmless(method):
    """They have nothing to write: all numbers stay finite, and so do the weights."""
    task = task_of(method, PROMPT, data=Documents(longest=2))
    for numbers in run(task, 3):
        if method == "didi":
            assert numbers["disc_accuracy"].item() == 0.5, "nobody can tell nothing from nothing"
    student = weights(task.distillation.student.network)
    assert all(value.isfinite().all() for value in student.values())


def test_windows_that_do_not_fit_are_refused():
    data = Documents()
    data.length = 5
    with pytest.raises(UserError, match="rows of 5 tokens.*windows.*have 6.*--length 6"):
        task_of("didi", data=data)
    with pytest.raises(ValueError, match="end their texts in different ways"):
        task_of("didi", student=windowed_network(1, ends=False, length=L))
