"""Recipes of pretraining, and the shape of a model that follows from one."""

from dataclasses import replace

import pytest

from didi_instruct.config.distill import DistillConfig
from didi_instruct.config.model import architecture
from didi_instruct.config.recipes import load_recipe, recipe_names
from didi_instruct.config.train import ModelRecipe, PretrainConfig
from didi_instruct.errors import UserError


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.endswith(("-teacher", "-ar"))])
def test_every_shipped_teacher_recipe_parses_and_says_what_it_reproduces(name):
    recipe = load_recipe(PretrainConfig, name)
    assert recipe.reproduces
    assert recipe.expect
    recipe.model.resolve(64)


def test_the_paper_recipes_carry_the_hyper_parameters_of_its_table():
    small = load_recipe(PretrainConfig, "owt-169m-teacher")
    assert small.model.resolve(50257) == architecture("small", dropout=0.1)
    assert (small.optim.lr, small.optim.beta1, small.optim.beta2) == (1e-4, 0.9, 0.95)
    assert (small.optim.weight_decay, small.optim.warmup) == (0.05, 2500)
    assert (small.optim.schedule, small.train.ema) == ("cosine", 0.9999)
    assert (small.train.batch_size, small.train.steps) == (336, 200_000)
    assert small.data.valid == 100_000
    medium = load_recipe(PretrainConfig, "owt-424m-teacher")
    assert medium.model.resolve(50257) == architecture("medium", dropout=0.1)
    assert medium.train.steps == 350_000


@pytest.mark.parametrize(
    ("name", "like", "kind", "curriculum"),
    [
        ("oracle-ar", "oracle-teacher", "ar", 0),
        ("owt-169m-ar", "owt-169m-teacher", "ar", 0),
        ("owt-169m-duo-teacher", "owt-169m-teacher", "duo", 100_000),
    ],
)
def test_models_beside_a_teacher_are_trained_as_it_is(name, like, kind, curriculum):
    """On the same text for as long; half of it with the curriculum, where the noise is uniform."""
    changes = [f"model.kind={kind}", f"curriculum.steps={curriculum}"]
    own, teacher = load_recipe(PretrainConfig, name), load_recipe(PretrainConfig, like, changes)
    assert own.reproduces != teacher.reproduces
    assert replace(teacher, reproduces=own.reproduces, expect=own.expect) == own


def test_the_vocabulary_follows_the_tokenizer_and_leaves_room_for_the_mask():
    assert ModelRecipe(arch="small").resolve(8192).vocab_size == 8193
    assert ModelRecipe(kind="duo").resolve(8192).vocab_size == 8192
    with pytest.raises(UserError, match="no room for all of them and the mask. Use 8193"):
        ModelRecipe(vocab_size=8192).resolve(8192)


def test_an_override_of_a_recipe_is_checked_like_the_file():
    with pytest.raises(UserError, match=r"oracle-teacher.yaml: `optim.lrr`.*Did you mean `lr`"):
        load_recipe(PretrainConfig, "oracle-teacher", ["optim.lrr=1"])
    with pytest.raises(UserError, match="Known: .*oracle-teacher"):
        load_recipe(PretrainConfig, "no-such-recipe")


@pytest.mark.parametrize("kind", [PretrainConfig, DistillConfig])
def test_a_value_that_was_removed_is_named(kind):
    name = "oracle-teacher" if kind is PretrainConfig else "oracle-didi"
    message = r"\.yaml: train\.compile=blocks was removed: leave it out\.$"
    with pytest.raises(UserError, match=message):
        load_recipe(kind, name, ["train.compile=blocks"])
