"""What every method of `METHODS` must do, whatever it learns."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.models.masked_folders import esm
from tests.random_models import randomise

from didi_instruct.config.model import law_of_lengths
from didi_instruct.distillation import run as runs
from didi_instruct.distillation.methods import METHODS, check_fit
from didi_instruct.distillation.methods import make_task as assemble
from didi_instruct.distillation.mixture import add_masks
from didi_instruct.distillation.run import Teacher
from didi_instruct.errors import UserError
from didi_instruct.models import discriminator
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.training import replica

from .small import (
    ALONE,
    DUO,
    PROMPT,
    STATE,
    Stream,
    largest_difference,
    make_task,
    moved,
    networks_of,
    run,
    settings,
    small_network,
    weights,
)

STEADY = {"optim": {"lr": 1e-3, "eps": 1e-3}}
"""A large eps: AdamW does not turn the rounding of a tiny gradient into a step of full size."""
SECOND = {
    "didi": "discriminator",
    "token-matching": "auxiliary",
    "dimo": "auxiliary",
    "sdtt": "teacher",
    "duo": "target",
}
LEARNERS = ("student", "discriminator", "auxiliary")
COUNTS_COLUMNS = ("sdtt", "duo")
LOGGED = {
    "didi": "policy_loss kl entropy path_entropy unique_4gram disc_loss disc_accuracy "
    "disc_sharpness disc_grad_norm disc_waits reward_student reward_reference advantage_std "
    "advantage_max clip_fraction student_waits at_chance",
    "token-matching": "matching_loss aux_loss aux_kl aux_grad_norm ratio_clip_fraction entropy "
    "path_entropy unique_4gram",
    "mixture": "component_loss code_information",
    "sdtt": "entropy target_entropy student_steps",
    "dimo": "aux_loss aux_kl aux_grad_norm tv entropy path_entropy unique_4gram",
    "duo": "entropy target_entropy delta",
}
WAITING = {
    "didi": {"loss", "policy_loss", "kl", "entropy", "grad_norm"},
    "token-matching": {"grad_norm"},
    "dimo": {"grad_norm"},
}
"""Numbers that mean nothing, and are not logged, while the student waits."""
WHOLE = {"discriminator": {"trainable_blocks": None}}
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def _quick_heads(monkeypatch):
    """Fifteen power iterations of a fresh head take longer than a whole step of these networks."""
    monkeypatch.setattr(discriminator, "INITIAL_ITERATIONS", 1)


def check_learning(task, steps):
    """The gradient reaches every weight of what learns, and of nothing else; the numbers."""
    before = {name: weights(network) for name, network in networks_of(task).items()}
    teacher = weights(task.distillation.teacher.network)
    numbers = run(task, steps)
    assert not moved(teacher, task.distillation.teacher.network)
    for name, network in networks_of(task).items():
        changed = moved(before[name], network)
        assert changed == (before[name].keys() if name in LEARNERS else set()), name
        assert not any(m.training for m in network.modules())
        assert all(p.grad is None for p in network.parameters())
        if name in LEARNERS:
            moments = {n: t for n, t in task.tensors().items() if n.startswith(f"{name}/")}
            assert all(t.any() for n, t in moments.items() if "/exp_avg/" in n), name
    return numbers


@every_method
def test_an_iteration_updates_what_learns_and_logs_its_numbers(method):
    task = make_task(method, WHOLE)
    if "auxiliary" in task.parts:  # something to learn from: it begins as the teacher
        randomise(task.parts["auxiliary"].network, 5)
    for numbers in check_learning(task, 2):
        assert numbers.keys() == {"loss", "grad_norm", *LOGGED[method].split()}
        assert numbers["grad_norm"].item() > 0
        assert METHODS[method].collapse_metric in (None, *numbers)
    assert task.describe(1, 2.0, 4)["iterations_per_second"] == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random ESM of 2 layers of width 32, whose embeddings depend on how much is masked."""
    path = tmp_path_factory.mktemp("esm")
    esm(path, hidden_size=32, intermediate_size=48)
    return path


def esm_task(method, folder, seed=3, lengths=()):
    """A task of two masked LMs of transformers; with `lengths` texts have windows of their own."""
    teacher = load_masked_lm(folder).model
    if lengths:
        teacher.config = replace(teacher.config, end_id=2, lengths=lengths)
    student = randomise(copy.deepcopy(teacher), seed)
    return make_task(method, WHOLE, teacher=teacher, student=student)


@pytest.mark.parametrize("lengths", [(), law_of_lengths("3-9", 12)], ids=["whole", "windows"])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "duo"])
def test_a_masked_lm_of_transformers_is_distilled(method, folder, lengths):
    task = esm_task(method, folder, lengths=lengths)
    assert task.distillation.length == (9 if lengths else 12)
    if "auxiliary" in task.parts:
        randomise(task.parts["auxiliary"].network, 5)
    check_learning(task, 2)
    assert networks_of(task)["student"].config.masks == (3 if method == "mixture" else 1)


@every_method
def test_a_checkpoint_has_the_networks_under_their_names(method):
    task = make_task(method)
    second = {SECOND[method]} if method in SECOND else set()
    names = {name.split("/")[0] for name in task.tensors()}
    assert names - {"watch"} == {"student", *second}
    watched = {n for n in task.tensors() if n.startswith("watch/")}
    expected = {"watch/accuracy", "watch/variety_at_start"}
    expected = expected if METHODS[method].collapse_metric else set()
    assert watched == expected | ({"watch/sharpness"} if method == "didi" else set())
    for name in second:  # it begins as the teacher; the teacher of later rounds as the student
        d, own = task.distillation, networks_of(task)[name]
        origin = weights((d.student if name == "teacher" else d.teacher).network)
        shared = {n: w for n, w in weights(own).items() if "output_layer.main" not in n}
        assert all(torch.equal(w, origin[n]) for n, w in shared.items())
        assert len(shared) > 10
    parameters = dict(task.distillation.student.network.named_parameters())
    for kind in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        assert {f"student/{kind}/{name}" for name in parameters} <= task.tensors().keys()
    if second & {"teacher", "target"}:
        assert {f"{SECOND[method]}/{name}" for name in parameters} <= task.tensors().keys()


@pytest.mark.parametrize(
    ("method", "saved", "family"),
    [(method, saved, "DiT") for method in METHODS for saved in (1, 2, 3)]
    + [(method, 2, "ESM") for method in METHODS if method != "duo"],
)
def test_resuming_is_bit_exact(method, saved, family, folder):
    """Before, at and after the end of a round, if there are rounds; from other weights."""
    if family == "ESM":
        through, other = esm_task(method, folder), esm_task(method, folder, seed=7)
    else:
        through = make_task(method)
        other = make_task(method, student=small_network(7, **(DUO if method == "duo" else {})))
    numbers = run(through, saved)
    state = {name: tensor.clone() for name, tensor in through.tensors().items()}
    numbers += [through.step(step) for step in range(saved, 5)]
    assert other.tensors().keys() == state.keys()
    with torch.no_grad():
        for name, tensor in other.tensors().items():
            tensor.copy_(state[name])
    for step in range(saved, 5):
        again = other.step(step)
        assert again.keys() == numbers[step].keys()
        assert all(torch.equal(again[name], numbers[step][name]) for name in again)
    ours = through.tensors()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in other.tensors().items())


CASES = [(method, {}) for method in METHODS] + [
    ("didi", {"didi": {"grouping": "tau", "rollout_steps": 2, "kl": "jeffreys"}}),
    ("didi", {"didi": STATE | {"group_size": 2, "kl_weight": 0.5}}),
    ("didi", {"discriminator": {"positions": "masked", "trainable_blocks": None, "steps": 2}}),
    ("didi", PROMPT),
    ("token-matching", {"token_matching": {"contexts": 3, "completion": 1.0, "anchor": 0.5}}),
    ("token-matching", PROMPT | {"token_matching": {"contexts": 2}}),
    ("dimo", {"dimo": {"budgets": [1, 4], "aux_steps": 2}}),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[
    f"{method}-{'-'.join(changes)}" for method, changes in CASES])  # fmt: skip
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_passes_share_a_batch_as_they_like(number, micro_batch):
    """Numbers and weights after two steps, to 1e-6; the student moved 100 times as far.

    The head's power iterations count updates, not passes: its singular vectors are the same too.
    """
    method, changes = CASES[number]
    options = {"data": Stream()} if "prompt" in changes else {}
    tasks = [
        make_task(method, STEADY | changes | {"train": {"micro_batch": size}}, **options)
        for size in (None, micro_batch)
    ]
    start = copy.deepcopy(networks_of(tasks[0])["student"])
    assert [len(task.distillation.micro_batches(0)) > 1 for task in tasks] == [False, True]
    for one, other in zip(*(run(task, 2) for task in tasks), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            expected = pytest.approx(one[name].item(), rel=1e-3, abs=1e-5)
            assert other[name].item() == expected, name
    whole, parts = (networks_of(task) for task in tasks)
    assert largest_difference(whole.values(), parts.values()) < 1e-6
    assert largest_difference([whole["student"]], [start]) > 1e-4
    for name in whole:
        for buffer, other in zip(whole[name].buffers(), parts[name].buffers(), strict=True):
            torch.testing.assert_close(buffer, other, rtol=0, atol=1e-5)


@every_method
def test_the_same_seed_gives_the_same_bits_and_another_does_not(method):
    first, again, other = (make_task(method, {"train": {"seed": seed}}) for seed in (3, 3, 4))
    for task in (first, again, other):
        run(task, 2)
    for one, another in zip(networks_of(first).values(), networks_of(again).values(), strict=True):
        assert not moved(weights(one), another)
    student = networks_of(first)["student"]
    assert moved(weights(student), networks_of(other)["student"])


@every_method
def test_padding_for_a_gpu_changes_nothing(method, monkeypatch):
    """Rows, and columns of probability 0, that a GPU is given."""
    changes = {"token_matching": {"anchor": 0.3, "ratio_clip": 0.1}, "sdtt": {"divergence": "mse"}}
    plain = make_task(method, changes)
    expected = run(plain, 3)
    monkeypatch.setattr(replica, "ROWS", 7)
    monkeypatch.setattr(replica, "pays_to_pad", lambda device: True)
    padded = make_task(method, changes)
    own = padded.distillation.student.network.align
    assert own == (1 if method in COUNTS_COLUMNS else runs.ALIGN)
    for step, theirs in enumerate(expected):
        ours = padded.step(step)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name, rtol=1e-4, atol=1e-6)
    one, other = (task.distillation.student.network.state_dict() for task in (padded, plain))
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, msg=name, rtol=1e-3, atol=1e-5)


@every_method
def test_every_text_is_read_once(method):
    """Rows in order over iterations, turns and parts: none is seen twice, none left out.

    Of methods that draw their own texts it is the prompts, one for each group or state.
    """
    data, texts = Stream(), 12
    changes = {"train": {"micro_batch": 4}, "discriminator": {"steps": 2}, "dimo": {"aux_steps": 2}}
    options = {"data": data} if method == "duo" else {"references": data.rows}
    if METHODS[method].texts == "":
        changes |= PROMPT | {"token_matching": {"contexts": 2, "aux_steps": 2}}
        texts, options = 6 if method == "token-matching" else 12, {"data": data}
    run(make_task(method, changes, **options), 2)
    turns = 2 if method in ("didi", "token-matching", "dimo") else 1
    assert [i for asked in data.asked for i in asked] == list(range(2 * turns * texts))


@pytest.mark.parametrize("method", WAITING)
def test_the_student_waits_during_warm_up(method):
    section = {"didi": "discriminator", "dimo": "dimo"}.get(method, "token_matching")
    task = make_task(method, {section: {"warmup": 2}})
    student, second = networks_of(task)["student"], networks_of(task)[SECOND[method]]
    before, critic = weights(student), weights(second)
    for step in range(2):
        numbers = task.step(step)
        assert numbers.keys() == {"loss", *LOGGED[method].split()} - WAITING[method]
        assert not moved(before, student)
        assert task.describe(step, 1.0, 1)["lr"] == 0
    assert moved(critic, second)
    shadow = task.distillation.student.ema.shadow
    assert all(torch.equal(v, before[n]) for n, v in shadow.items())
    assert "grad_norm" in task.step(2)
    assert moved(before, student) == before.keys()
    groups = task.distillation.student.updater.optimizer.param_groups
    assert task.describe(2, 1.0, 1)["lr"] == groups[0]["lr"] == 1e-3, "the schedule begins now"


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].collapse_metric])
def test_the_variety_at_the_start_is_that_of_the_first_texts(method, monkeypatch):
    """The mean of the metric over iterations until 32 texts of 12 each are drawn: three."""
    monkeypatch.setattr(runs, "ENOUGH_TEXTS", 32)
    task = make_task(method)
    found = [numbers[METHODS[method].collapse_metric].item() for numbers in run(task, 5)]
    assert task.variety_at_start.item() == pytest.approx(sum(found[:3]) / 3, rel=1e-12)
    assert len(set(found)) == 5


@pytest.mark.parametrize("method", ["didi", "token-matching", "sdtt"])
def test_the_log_follows_the_teacher_at_the_start_where_an_entry_follows(method):
    task = make_task(method, {"train": {"log_every": 2, "save_every": 5}})
    found = ["kl_start" in numbers for numbers in run(task, 6)]
    assert found == [False, True, False, True, True, True]


# What is refused


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("mixture", "duo")])
def test_other_methods_do_not_know_several_masks(method):
    student = add_masks(small_network(1), 3, seed=0, spread=1.0)
    with pytest.raises(UserError, match=f"has 3 masks, which {method} does not know: use method"):
        make_task(method, student=student)


def test_references_and_prompts_have_to_come_from_somewhere():
    config = settings("didi", {"reference": {"source": "bank"}})
    teacher = Teacher(network=small_network(0), tokenizer=None, fingerprint="")
    with pytest.raises(ValueError, match="references are needed for reference.source=bank"):
        assemble(config, teacher, small_network(1), ALONE)
    with pytest.raises(ValueError, match="prompts come from data"):
        make_task("didi", PROMPT)


@pytest.mark.parametrize(
    ("changes", "rows", "processes", "message"),
    [
        ({"discriminator": {"trainable_blocks": 3}}, None, 1, "is 3, but the teacher has 2 blocks"),
        ({}, 9, 1, "rows of 9 tokens, but the teacher reads at most 8"),
        (PROMPT | {"prompt": 8}, 8, 1, "prompt is 8, but texts have 8 tokens"),
        (PROMPT | {"prompt": 6}, 6, 1, "prompt is 6, but texts have 6 tokens"),
        ({"didi": {"grouping": "tau"}}, None, 2, "12, which 2 processes cannot share in whole"),
    ],
)
def test_settings_that_do_not_fit_a_teacher_are_refused(changes, rows, processes, message):
    with pytest.raises(UserError, match=message):
        check_fit(settings("didi", changes), small_network(), rows=rows, processes=processes)
    check_fit(settings("didi", {}), small_network(), rows=6)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("sdtt", {"train": {"steps": 7}}, "train.steps is 7.*rounds of sdtt.iterations, 2"),
        ("sdtt", {"train": {"steps": 10}}, "sdtt.steps is 16, which 5 rounds.*use 4 rounds"),
        ("sdtt", {"sdtt": {"steps": 1}}, "sdtt.steps is 1: use 2 or more"),
        ("duo", {"train": {"steps": 5}}, "train.steps is 5, which is not a whole number of rounds"),
        ("duo", {"duo": {"steps": 3}}, "use 2 rounds at most"),
        ("duo", {"duo": {"steps": 1}}, "duo.steps is 1: use 2 or more"),
        ("duo", {"duo": {"gamma": [1.0, -1.0]}}, "the smaller first"),
        ("duo", {"prompt": 2}, "prompt is 2, but method=duo learns whole texts"),
        ("dimo", {"dimo": {"random": 1.0}}, "dimo.random is 1.0: use 0 or more and less than 1"),
        ("dimo", {"dimo": {"noise": -0.1}}, "dimo.noise is -0.1"),
        ("dimo", {"dimo": {"budgets": []}}, r"dimo.budgets is \[\]: step counts"),
        ("dimo", {"dimo": {"beta": float("inf")}}, "dimo.beta is inf"),
        ("dimo", {"dimo": {"aux_lr": 0.0}}, "dimo.aux_lr is 0.0"),
        ("dimo", {"dimo": {"aux_steps": 0}}, "dimo.aux_steps is 0: use 1 or more"),
        ("dimo", {"dimo": {"warmup": 10}}, "train.steps is 6 and dimo.warmup takes 10"),
    ],
)
def test_settings_that_mean_nothing_are_refused(method, changes, message):
    """Those of the other methods: `tests/config/test_distill.py`."""
    with pytest.raises(UserError, match=message):
        settings(method, changes)
