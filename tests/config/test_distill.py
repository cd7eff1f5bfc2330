"""Settings of a distillation: each within its bounds, and none that contradicts another."""

import pytest

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.schema import apply_overrides, parse
from didi_instruct.errors import UserError

BOUNDS = {
    "use 1 or more": "didi.rollout_steps=0 discriminator.steps=0 reference.steps=0 "
    "reference.rows=0 token_matching.contexts=0 token_matching.aux_steps=0 mixture.codes=0 "
    "mixture.learning=0 dimo.aux_steps=0 sdtt.iterations=0 duo.iterations=0 train.steps=0",
    "use 2 or more": "watch.samples=1 sdtt.steps=1 duo.steps=1",
    "use 0 or more": "didi.advantage_clip=-1 didi.kl_weight=-1 didi.kl_weight=.nan "
    "didi.entropy_weight=-1 discriminator.trainable_blocks=-1 discriminator.warmup=-1 "
    "discriminator.lr_warmup=-1 discriminator.weight_decay=-1 token_matching.warmup=-1 "
    "token_matching.ratio_clip=-1 token_matching.anchor=-0.1 token_matching.completion=-1 "
    "mixture.spread=-1 dimo.warmup=-1 lora.rank=-1 optim.clip=-1 train.eval_every=-1",
    "use 0 or more and less than 1": "discriminator.dropout=1.0 dimo.random=1 dimo.noise=-0.1 "
    "watch.min_entropy=1 watch.min_entropy=-0.1 optim.beta1=1 train.ema=1",
    "use 0 to 1": "mixture.random=1.1 optim.final=-0.1",
    "use more than 0 and less than 1": "didi.omega_min_time=0 didi.omega_min_time=1",
    "0 or more, below 0.5": "discriminator.label_smoothing=0.5 discriminator.label_smoothing=-0.1",
    "use a finite number": "dimo.beta=.inf dimo.beta=.nan",
    "use a finite number above 0": "didi.advantage_eps=0 discriminator.lr=0 discriminator.lr=.inf "
    "token_matching.aux_lr=0 dimo.aux_lr=0 optim.lr=.nan lora.alpha=0",
    "two whole numbers, 1 or more": "didi.pi=[2] didi.pi=[1,2,3] didi.pi=[0,1]",
    "two numbers from -30 to 30, the smaller first": "duo.gamma=[1] duo.gamma=[0,-1] "
    "duo.gamma=[-31,0]",
    "step counts, 1 or more": "token_matching.budgets=[] token_matching.budgets=[4,0] "
    "mixture.budgets=[] mixture.budgets=[4,0] dimo.budgets=[] watch.budgets=[8,0]",
}
"""Settings out of bounds, by the remedy."""
CASES = [(change, remedy) for remedy, changes in BOUNDS.items() for change in changes.split()]


def refused(values):
    """The message, without the place that it starts with."""
    with pytest.raises(UserError) as caught:
        parse(DistillConfig, values, where="test.yaml")
    place, message = str(caught.value).split(": ", 1)
    assert place == "test.yaml"
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("change", "remedy"), CASES)
def test_a_setting_out_of_bounds_is_named_with_the_remedy(change, remedy):
    message = refused(apply_overrides({}, [change]))
    name = change.partition("=")[0]
    assert message.startswith(f"{name} is ")
    assert message.endswith(f": {remedy}.")


STATE = {"grouping": "state", "score_steps": "last"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"didi": {"group_size": 1}},
            "didi.group_size is 1, but an advantage compares rollouts within a group: "
            "use 2 or more.",
        ),
        (
            {"didi": STATE | {"score_decomposition": False}},
            "didi.grouping=state shares z_τ: it needs didi.score_decomposition.",
        ),
        (
            {"didi": STATE | {"score_steps": "all"}},
            "didi.grouping=state shares the steps before z_τ, so their advantages cancel: "
            "use didi.score_steps=last.",
        ),
        (
            {"didi": {"score_decomposition": False, "score_steps": "last"}},
            "didi.score_steps=last scores the jump from z_τ: it needs didi.score_decomposition.",
        ),
        (
            {"didi": {"score_decomposition": False, "rollout_steps": 2}},
            "didi.rollout_steps is 2, the steps to z_τ: it needs didi.score_decomposition.",
        ),
        (
            {"discriminator": {"chance": 0.95}},
            "discriminator.chance is 0.95 and discriminator.saturation 0.95: "
            "accuracies from 0 to 1, chance the smaller; null is off.",
        ),
        (
            {"discriminator": {"chance": -0.1}},
            "discriminator.chance is -0.1 and discriminator.saturation 0.95: "
            "accuracies from 0 to 1, chance the smaller; null is off.",
        ),
        (
            {"token_matching": {"completion": 1}},
            "token_matching.contexts is 1, but the completion term compares draws that share a "
            "state: use 2 or more.",
        ),
        ({"prompt": -1}, "prompt is -1: use 0 (nothing given) or more."),
        (
            {"prompt": 2},
            "prompt gives the first tokens of real text: name it with `data.source`.",
        ),
        (
            {"reference": {"source": "data"}},
            "reference.source=data takes real text: name it with `data.source`.",
        ),
        (
            {"didi": {"grouping": "tau", "group_size": 3}},
            "train.batch_size is 64, which is not a multiple of didi.group_size, 3.",
        ),
        (
            {"method": "token-matching", "token_matching": {"contexts": 5}},
            "train.batch_size is 64, which is not a multiple of token_matching.contexts, 5.",
        ),
        (
            {"train": {"steps": 50}, "discriminator": {"warmup": 50}},
            "train.steps is 50 and discriminator.warmup takes 50 of them: the student would not "
            "learn.",
        ),
        (
            {"train": {"batch_size": 1}},
            "train.batch_size is 1, but an advantage compares texts: use 2 or more.",
        ),
        (
            {"method": "didi", "order": "streams", "didi": {"score_steps": "last"}},
            "didi.rollout_steps is 1, but order=streams stops on the way of a path of that many "
            "steps: use 2 or more (8, if 8 are to be sampled).",
        ),
        (
            {"method": "didi", "order": "streams", "didi": {"rollout_steps": 8}},
            "didi.score_steps is all, but in order=streams only the jump from the stop to text is "
            "scored: use last.",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, message):
    assert refused(values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"didi": {"group_sise": 4}},
            "`didi.group_sise` is not a setting. Did you mean `group_size`?",
        ),
        ({"discriminatr": {}}, "`discriminatr` is not a setting. Did you mean `discriminator`?"),
        (
            {"method": "dido"},
            "`method` is 'dido'; choose one of didi, token-matching, mixture, sdtt, dimo, duo.",
        ),
        (
            {"didi": {"grouping": "group"}},
            "`didi.grouping` is 'group'; choose one of batch, tau, state.",
        ),
    ],
)
def test_a_typo_is_named_with_what_was_meant(values, message):
    assert refused(values) == message


@pytest.mark.parametrize(
    "values",
    [
        {"watch": {"budgets": [], "min_entropy": 0}},
        {"didi": {"kl_weight": 0, "entropy_weight": 0, "advantage_clip": 0}},
        {"didi": {"grouping": "batch", "group_size": 3}},
        {"discriminator": {"trainable_blocks": 0, "label_smoothing": 0}},
        {"reference": {"source": "data"}, "data": {"source": "oracle"}},
        {"reference": {"source": "data"}, "method": "token-matching"},
        {"token_matching": {"contexts": 2, "completion": 1, "ratio_clip": 0}},
    ],
)
def test_the_least_that_means_something_is_accepted(values):
    parse(DistillConfig, values, where="test.yaml")


PROMPT = {"prompt": 2, "data": {"source": "oracle"}}


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, 1),
        ({"didi": {"grouping": "tau", "group_size": 8}}, 8),
        ({"didi": STATE}, 4),
        (PROMPT, 4),
        ({"method": "token-matching"}, 1),
        ({"method": "token-matching", "token_matching": {"contexts": 2}}, 2),
        ({"method": "token-matching", "didi": STATE}, 1),
    ],
)
def test_texts_that_belong_together(values, size):
    assert parse(DistillConfig, values, where="test.yaml").group_size == size


@pytest.mark.parametrize(("method", "warmup"), [("didi", 5), ("token-matching", 7)])
def test_each_method_has_its_own_warm_up(method, warmup):
    values = {"discriminator": {"warmup": 5}, "token_matching": {"warmup": 7}}
    assert parse(DistillConfig, values | {"method": method}, where="test.yaml").warmup == warmup


def test_an_optimizer_given_in_part_keeps_the_papers_other_settings():
    optim = parse(DistillConfig, {"optim": {"lr": 1e-4}}, where="mine.yaml").optim
    found = (optim.lr, optim.beta2, optim.weight_decay, optim.schedule)
    assert found == (1e-4, 0.999, 0.01, "linear")


def test_a_mixture_needs_neither_groups_nor_a_warm_up():
    config = parse(
        DistillConfig,
        {
            "method": "mixture",
            "token_matching": {"contexts": 5},
            "discriminator": {"warmup": 9000},
            "train": {"batch_size": 7, "steps": 10},
        },
        where="test",
    )
    assert (config.group_size, config.warmup) == (1, 0)
