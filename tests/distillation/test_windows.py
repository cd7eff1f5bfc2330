"""Texts with windows of their own: where they start, ends that stay, losses of the text alone."""

import pytest
import torch
from tests.sampling.enumeration import FALSE_ALARM, p_value

from didi_instruct.config.model import ModelConfig
from didi_instruct.distillation.didi import make_pair, write_texts
from didi_instruct.distillation.losses import kl
from didi_instruct.distillation.mixture import make_part
from didi_instruct.distillation.rollout import Noise, Starts
from didi_instruct.errors import UserError
from didi_instruct.models.dit import DiT
from didi_instruct.models.layers import NEVER
from didi_instruct.process.masking import LengthLaw, before_end

from .small import batch_of, make_task, small_network, weights

L, END, MASK = 6, 0, 5
LENGTHS = (0, 3, 5, 0, 0, 4, 1)
METHODS = ["didi", "token-matching", "mixture"]
STATE = {"grouping": "state", "group_size": 3, "score_steps": "last", "rollout_steps": 2}


class Documents:
    """Texts of 0 to 6 tokens, each with its end and more of it behind: a TokenSource."""

    num_tokens, num_sequences, fingerprint, tokenizer, length = 5, None, "documents", None, L

    def __init__(self, longest=L):
        self.longest = longest

    def rows(self, start, count):
        row = torch.arange(start, start + count)[:, None]
        place = torch.arange(L)
        text = 1 + (row * 7 + place * (1 + row % 3)) % 4
        return torch.where(place < row % (self.longest + 1), text, END)

    ordered = rows


def network(seed, *, ends=True, **changes):
    """A small network that never writes an end, whether it knows of ends or not."""
    own = {"length": L, "end_id": END, "lengths": LENGTHS} if ends else {}
    found = small_network(seed, **(own | changes))
    with torch.no_grad():
        found.output_layer.linear.bias[END] = NEVER
    return found


def task_of(method, changes=None, **options):
    nets = {"teacher": network(0), "student": network(1)} | options
    return make_task(method, changes, **nets)


PROMPT = {"prompt": 2, "data": {"source": "documents"}, "didi": {"group_size": 3}}


# Where texts start


def test_lengths_follow_the_teachers_law_and_belong_to_their_texts():
    """Chi-square of 20,000 lengths against the law."""
    law = LengthLaw(LENGTHS)
    starts, noise = Starts(MASK, L, end_id=END, law=law), Noise(3, torch.arange(20_000))
    start, owner = starts(noise)
    assert len(start) == 6, "each length is there once"
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
    starts = Starts(MASK, L, end_id=END, law=LengthLaw(LENGTHS))
    noise = Noise(3, torch.arange(30, 60))
    start, owner = starts(noise, group=3)
    assert torch.equal(owner, owner[::3].repeat_interleave(3))
    alone, which = starts(noise.of_groups(3))
    assert torch.equal(start[owner[::3]], alone[which])


def test_a_prompt_and_its_own_end_are_given():
    starts = Starts(MASK, L, prompt=2, end_id=END, law=LengthLaw(LENGTHS))
    rows = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 1, 2], [1, 2, 0, 0, 0, 0], [0] * 6])
    M = MASK
    given = [[1, 2, M, M, 0, 0], [1, 2, M, M, M, M], [1, 2, 0, 0, 0, 0], [0] * 6]
    start, owner = starts(Noise(0, torch.arange(8)), rows)
    assert start.tolist() == given
    assert owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert starts.log_prob(start).tolist() == [0, 0, 0, 0], "nothing was drawn"


def test_texts_that_fill_their_windows_share_one_row():
    starts = Starts.of(ModelConfig(vocab_size=6, length=8), 8, 0)
    start, owner = starts(Noise(0, torch.arange(5)))
    assert starts.shared
    assert start.tolist() == [[5] * 8]
    assert owner.tolist() == [0] * 5
    x = torch.tensor([[1, 0, 3]])
    assert Starts.of(ModelConfig(vocab_size=6, length=3), 3, 1).open(x).tolist() == [[0, 1, 1]]


# Ends stay


def behind(start, owner=None):
    rows = start if owner is None else start[owner]
    return rows == END


@pytest.mark.parametrize("didi", [{}, STATE, {"score_decomposition": False}])
@pytest.mark.parametrize("prompt", [False, True])
def test_didi_never_changes_an_end(didi, prompt):
    """Of rollouts and corruptions on both sides; teacher texts are whole documents."""
    changes = {"didi": {"group_size": 3} | didi} | ({"data": PROMPT["data"]} if prompt else {})
    changes |= {"prompt": 2} if prompt else {}
    task = task_of("didi", changes, data=Documents() if prompt else None)
    for step in range(4):
        part = make_pair(task.distillation, batch_of(task, step), write_texts)
        ends = behind(part.rollout.jumps[0].z[part.rollout.jumps[0].state])
        ends = ends if len(ends) == 12 else ends.repeat_interleave(3, 0)
        given = torch.zeros_like(ends)
        given[:, : task.config.prompt] = True
        assert torch.equal(part.rollout.written, ~ends & ~given)
        for z in (part.rollout.x, part.fake.z):
            assert (z[ends] == END).all()
        for jump in part.rollout.jumps:
            assert not (jump.writes & ends[:: 12 // len(jump.writes)]).any()
        clean = before_end(part.real.z, END)
        assert (part.real.z[~clean] == END).all(), "nothing follows the end of a reference"
        assert torch.equal(part.real.written, clean & ~given[: len(clean)])
    if not prompt:
        lengths = part.rollout.written.sum(1)
        assert lengths.unique().numel() > 1
        if didi is STATE:
            assert torch.equal(lengths, lengths[::3].repeat_interleave(3))


@pytest.mark.parametrize("contexts", [1, 3])
@pytest.mark.parametrize("prompt", [False, True])
def test_token_matching_never_changes_an_end(contexts, prompt):
    changes = {"token_matching": {"contexts": contexts}}
    changes |= {k: PROMPT[k] for k in ("prompt", "data")} if prompt else {}
    task = task_of("token-matching", changes, data=Documents() if prompt else None)
    for step in range(4):
        plan = task.method.plan(batch_of(task, step))
        ends = behind(plan.start, plan.owner)
        assert not (plan.revealed & ends).any()
        drawn = task.method.draw(plan, learns=False)
        assert (drawn.z[ends] == END).all()
        for z in (drawn.x, drawn.context):
            assert (z[ends[plan.state]] == END).all()


@pytest.mark.parametrize("given", ["data", "online"])
@pytest.mark.parametrize("prompt", [0, 2])
def test_mixture_never_changes_an_end(given, prompt):
    data = Documents()
    task = task_of(
        "mixture",
        {"prompt": prompt, "data": PROMPT["data"]},
        data=data,
        references=data.rows if given == "data" else None,
    )
    for step in range(4):
        part = make_part(task.distillation, batch_of(task, step))
        written = before_end(part.x, END) & (torch.arange(L) >= prompt)
        assert torch.equal(part.z[~written], part.x[~written])
        if given == "data" or prompt:
            rows = data.rows(12 * step, 12)
            assert torch.equal(part.x[:, :prompt], rows[:, :prompt])
            assert (part.x[rows == END] == END).all()
        assert (part.z[part.t == 1][written[part.t == 1]] == MASK).all()
        assert not (part.revealed & ~written).any()
        last = part.t == 0.25
        assert torch.equal(part.revealed[last], (part.z == MASK)[last])


def test_a_teachers_texts_have_the_lengths_of_its_law():
    """And no end is written inside a text.

    The mean is 0.2 off at most, over five standard errors (6e-7 false alarms).
    """
    task = task_of("mixture", {"train": {"batch_size": 2000}})
    texts = task.distillation.teacher_texts(0, 2000)
    clean, lengths = before_end(texts, END), torch.arange(1, len(LENGTHS))
    mean = (LengthLaw(LENGTHS).log_prob(lengths).exp() * lengths).sum().item()
    assert (texts[~clean] == END).all()
    assert int((texts == MASK).sum()) == 0
    assert clean.sum(1).double().mean().item() == pytest.approx(mean, abs=0.2)


# A window is worth its text


@pytest.fixture
def unseen_ends(monkeypatch):
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
}


@pytest.mark.usefixtures("unseen_ends")
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_windows_is_the_step_on_their_texts(name):
    """Texts of 4 tokens in windows of 6: every number and gradient of a model whose texts fill 4.

    Other lengths have a chance of 1e-11.
    """
    method, changes = CASES[name]
    always = {"length": L, "end_id": END, "lengths": (0, 0, 0, 0, 10**12, 0, 0)}
    found = []
    for settings in (always, {"length": 4}):
        nets = [network(seed, ends=False, **settings) for seed in (0, 1)]
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
        laws = [net(z, sigma)[0, :n].log_softmax(-1) for net in (network(0), network(1))]
        terms.append(kl(*laws))
    expected = torch.cat(terms).mean().item()
    assert task.distillation.kl_at_start().item() == pytest.approx(expected, rel=1e-4)


# Nothing to write


@pytest.mark.parametrize("longest", [L, 2], ids=["some texts", "no text"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_no_longer_than_their_prompts_are_harmless(method, longest):
    """They have nothing to write: all numbers stay finite, and so do the weights."""
    task = task_of(method, PROMPT, data=Documents(longest))
    for step in range(3):
        numbers = task.step(step)
        assert all(value.isfinite() for value in numbers.values()), numbers
        if method == "didi" and longest == 2:
            assert numbers["disc_accuracy"].item() == 0.5, "nobody can tell nothing from nothing"
    assert all(
        value.isfinite().all() for value in weights(task.distillation.student.network).values()
    )


# What does not fit


def test_rows_are_as_long_as_the_windows():
    data = Documents()
    data.length = 5
    with pytest.raises(UserError, match="rows of 5 tokens.*windows.*have 6.*--length 6"):
        task_of("didi", data=data)


def test_student_and_teacher_end_alike():
    with pytest.raises(ValueError, match="end their texts in different ways"):
        task_of("didi", student=network(1, ends=False, length=L))
