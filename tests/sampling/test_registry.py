"""The registry of samplers: names, the models they fit, and their options."""

import re

import pytest

from didi_instruct.cli.generate import command
from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.sampling.registry import PLAIN, SAMPLERS, find_sampler


def test_the_command_line_names_all_samplers():
    (option,) = command.__annotations__["sampler"].__metadata__
    assert re.findall(r"[a-z-]+", option.help) == list(SAMPLERS)


def test_the_plain_sampler_of_a_kind_takes_every_model_of_that_kind():
    for kind, name in PLAIN.items():
        sampler = find_sampler(None, kind)
        assert (sampler.name, sampler.kind) == (name, kind)
        assert sampler.fits(ModelConfig(kind=kind), has_discriminator=False)


@pytest.mark.parametrize(
    ("name", "config", "guided", "fits"),
    [
        ("rgas", {}, True, True),
        ("rgas", {}, False, False),
        ("dimo", {"vocab_size": 50259, "masks": 2}, True, False),
        ("dimo", {}, False, True),
        ("uniform-state", {}, True, False),
    ],
)
def test_an_entry_says_which_models_it_fits(name, config, guided, fits):
    assert SAMPLERS[name].fits(ModelConfig(**config), has_discriminator=guided) == fits


def test_all_options_are_the_defaults_with_the_order_of_the_model():
    ancestral = SAMPLERS["ancestral"]
    random = {"grid": "uniform", "order": "random", "greedy_tail": False}
    assert ancestral.all_options({}, "random") == random
    assert ancestral.all_options({}, "streams") == random | {"grid": None, "order": "streams"}
    assert ancestral.all_options({"order": "random"}, "streams") == random
    assert SAMPLERS["first-hitting"].all_options({}, "streams") == {}
    with pytest.raises(UserError, match="`first-hitting` has no options"):
        SAMPLERS["first-hitting"].parse({"grid": "uniform"})
