"""Requests: prompts, gaps and fixed tokens through the public face."""

from dataclasses import replace

import pytest
import torch
from tests.random_models import add_noise

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import train_tokenizer
from didi_instruct.errors import UserError
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import build_model
from didi_instruct.sampling.generate import Request

TEXT = "once upon a time there was a small cat who liked to play in the garden every day"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 20, 300)


def make(tokenizer, kind="mdlm", discriminator=False):
    torch.manual_seed(0)
    extra = 0 if kind == "duo" else 1
    config = ModelConfig(
        kind=kind, layers=1, hidden=32, heads=2, cond_dim=8, length=40,
        vocab_size=tokenizer.size + extra, time_conditioning=kind == "duo",
        schedule=ScheduleConfig(eps=1e-3),
    )  # fmt: skip
    network = add_noise(build_model(config))
    guide = build_discriminator(config) if discriminator else None
    return didi.Model(network, config, tokenizer, guide)


MASKED = [
    "ancestral", "confidence", "entropy", "margin", "remasking", "blocks", "first-hitting", "dplm",
]  # fmt: skip


def steps_of(sampler):
    return {} if sampler in ("first-hitting", "autoregressive") else {"steps": 4}


@pytest.mark.parametrize("sampler", MASKED)
def test_every_sampler_keeps_what_is_given(tokenizer, sampler):
    model = make(tokenizer)
    before, after = tokenizer.encode(["once upon a time", " every day"])
    drawn = model.sample(
        num=3, sampler=sampler, prompt="once upon a time", suffix=" every day", **steps_of(sampler)
    )
    assert drawn.shape == (3, 40)
    assert drawn[:, : len(before)].tolist() == [before] * 3
    assert drawn[:, -len(after) :].tolist() == [after] * 3
    assert int(drawn.max()) < tokenizer.size
    assert int(drawn.min()) >= 0


@pytest.mark.parametrize("sampler", [*MASKED, "rgas", "uniform-state", "autoregressive"])
def test_a_sample_is_the_same_in_any_batch(tokenizer, sampler):
    kind = {"uniform-state": "duo", "autoregressive": "ar"}.get(sampler, "mdlm")
    model = make(tokenizer, kind, discriminator=kind == "mdlm")
    wish = {"num": 5, "sampler": sampler, "seed": 2, "length": 20, **steps_of(sampler)}
    assert torch.equal(model.sample(**wish), model.sample(**wish, batch_size=2))


def test_rgas_needs_and_uses_the_discriminator(tokenizer):
    with pytest.raises(UserError, match="needs a discriminator"):
        make(tokenizer).sample(sampler="rgas")
    model = make(tokenizer, discriminator=True)
    drawn = model.draw(num=2, steps=4, sampler="rgas", options={"candidates": 3})
    assert (drawn.nfe, drawn.disc_calls) == (4, 2 + 3 * 2)
    plain = {"h_start": 0.0, "h_end": 0.0, "candidates": 1}
    assert torch.equal(
        model.sample(num=2, steps=4, sampler="rgas", options=plain), model.sample(num=2, steps=4)
    )


def test_prompts_of_different_lengths_share_a_batch(tokenizer):
    """Each is continued as it would be alone."""
    model = make(tokenizer)
    prompts = ["once", "once upon a time there was"]
    together = model.sample(num=2, steps=4, prompt=prompts, length=24)
    assert together.shape == (4, 24)
    ids = tokenizer.encode(prompts)
    for row, given in zip(together.tolist(), [ids[0], ids[0], ids[1], ids[1]], strict=True):
        assert row[: len(given)] == given
    assert torch.equal(together[:2], model.sample(num=2, steps=4, prompt="once", length=24))
    more = model.sample(num=3, steps=4, prompt=prompts, length=24)
    assert torch.equal(together[2:], more[3:5])  # sample i of a prompt is the same among any number


def test_a_length_is_that_of_the_text_and_of_its_tokens(tokenizer):
    """Where texts have windows of their own, a window is filled with ends, which are not asked for.

    The network sees them all the same: the text is one of that length in a window of 40.
    """
    model, end = make(tokenizer), tokenizer.eot_id
    model.config = replace(model.config, end_id=end, lengths=(0, 1, 1, 2, *[1] * 37))
    window = model.request(Request(num=3, steps=4, length=12)).tokens
    assert window.shape == (3, 40)
    assert bool((window[:, 12:] == end).all())
    drawn = model.sample(num=3, steps=4, length=12)
    assert drawn.dtype == torch.long
    assert torch.equal(drawn, window[:, :12])
    assert torch.equal(model.draw(num=3, steps=4, length=12).tokens, drawn)
    assert model.generate(num=3, steps=4, length=12) == model.texts(drawn)
    assert model.sample(num=3, steps=4).shape == (3, 40)
    assert model.sample(num=1, steps=4, length=12, prompt="once", suffix=" day").shape == (1, 12)


def test_padding_is_never_attended(tokenizer):
    """Rows of an infilling differ in length; a row is what it would be in a batch of its own."""
    model = make(tokenizer)
    wish = {"num": 6, "steps": 4, "infill": "once ___ time ___ garden", "gap": "1-6"}
    together = model.sample(**wish)
    alone = model.sample(**wish, batch_size=1)
    assert torch.equal(together, alone)
    lengths = (together >= 0).sum(1)
    assert len(lengths.unique()) > 1
    for text in model.generate(**wish):
        assert text.startswith("once")
        assert text.endswith(" garden")


@pytest.mark.parametrize("gap", ["3", "2-5", "auto:1-6"])
def test_gaps_are_fixed_ranged_or_chosen(tokenizer, gap):
    model = make(tokenizer)
    row = model.sample(num=1, steps=2, infill="once ___ time", gap=gap)
    given = len(tokenizer.encode(["once", " time"])[0]) + len(tokenizer.encode([" time"])[0])
    low, high = {"3": (3, 3), "2-5": (2, 5), "auto:1-6": (1, 6)}[gap]
    assert low <= row.shape[1] - given <= high


def test_fixed_tokens_anywhere(tokenizer):
    model = make(tokenizer)
    tokens = torch.full((10,), model.mask_id)
    tokens[3], tokens[7] = 5, 6
    drawn = model.sample(num=2, steps=3, tokens=tokens)
    assert drawn[:, [3, 7]].tolist() == [[5, 6]] * 2


def test_text_ends_at_the_end_of_text_that_was_written(tokenizer):
    model, eot = make(tokenizer), tokenizer.eot_id
    once, upon = tokenizer.encode(["once", " upon"])
    row = torch.tensor([[eot, *once, eot, *upon, -1]])
    assert model.texts(row) == ["once"]
    prompt = torch.zeros_like(row, dtype=torch.bool)
    prompt[0, len(once) + 2 :] = True  # an end of text inside the prompt ends nothing
    assert model.texts(row, prompt) == ["once upon"]
    closed = torch.ones_like(row, dtype=torch.bool)
    closed[0, -2:] = False  # what is given at the end belongs to the text
    assert model.texts(row, closed) == ["once upon"]


def test_choosing_a_gap_costs_passes(tokenizer):
    model = make(tokenizer)
    wish = {"num": 2, "steps": 1, "infill": "once ___ time"}
    fixed = model.draw(**wish, gap="3").passes
    chosen = model.draw(**wish, gap="auto:1-6").passes
    assert chosen >= fixed + 6 / 2 - 0.5


@pytest.mark.parametrize("kind", ["duo", "ar"])
def test_other_kinds_have_their_own_sampler(tokenizer, kind):
    model = make(tokenizer, kind)
    drawn = model.draw(num=2, prompt="once", length=12, **({} if kind == "ar" else {"steps": 4}))
    given = tokenizer.encode(["once"])[0]
    assert drawn.tokens[:, : len(given)].tolist() == [given] * 2
    assert int(drawn.tokens.max()) < tokenizer.size
    with pytest.raises(UserError, match="does not sample models of kind"):
        model.sample(sampler="ancestral")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"sampler": "ancestrl"}, "Did you mean `ancestral`"),
        ({"prompt": TEXT * 5}, "nothing is left to write"),
        ({"infill": "no gap here"}, "no gap"),
        ({"infill": "a ___", "prompt": "b"}, "leave out prompt"),
        ({"infill": TEXT + " ___ " + TEXT}, "the model reads 40"),
        ({"infill": "a ___", "length": 9}, "leave out length"),
        ({"gap": "3"}, "give infill too"),
        ({"sampler": "first-hitting", "steps": 3}, "leave out steps"),
        ({"sampler": "confidence", "steps": 3, "options": {"threshold": 0.5}}, "leave out steps"),
        ({"sampler": "first-hitting", "options": {"grid": "x"}}, "has no options"),
        ({"num": 2.0}, "whole number"),
        ({"tokens": torch.tensor([9999])}, "ids of 0"),
        ({"options": {"gird": "cosine"}}, "Did you mean `grid`"),
        ({"temprature": 0.5}, "Did you mean `temperature`"),
        ({"sampler": "rgas", "options": {"candidates": 0}}, "candidates"),
    ],
)
def test_bad_wishes_are_refused(tokenizer, wish, message):
    with pytest.raises(UserError, match=message):
        make(tokenizer, discriminator=True).sample(**wish)


def test_options_reach_the_sampler():
    language = OracleLanguage.default()
    config = ModelConfig(
        layers=1, hidden=16, heads=2, cond_dim=8, vocab_size=65, length=32,
        schedule=ScheduleConfig(eps=0.0),
    )  # fmt: skip
    model = didi.Model(build_model(config), config, language.tokenizer)
    times = [1.0, 0.9, 0.0]
    seen = []
    model.draw(steps=2, options={"grid": times}, callback=lambda step: seen.append(step.time))
    assert seen == times[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [*MASKED, "rgas", "uniform-state", "autoregressive"])
def test_the_gpu_draws_what_the_cpu_draws(tokenizer, sampler):
    """Same noise; float32 products differ in the last bits, which may flip a rare token."""
    kind = {"uniform-state": "duo", "autoregressive": "ar"}.get(sampler, "mdlm")
    model = make(tokenizer, kind, discriminator=kind == "mdlm")
    wish = {"num": 8, "sampler": sampler, "prompt": "once", "length": 24, **steps_of(sampler)}
    on_cpu = model.sample(**wish)
    model.network.cuda()
    if model.discriminator is not None:
        model.discriminator.cuda()
    on_gpu = model.sample(**wish).cpu()
    same_rows = (on_cpu == on_gpu).all(1).float().mean()
    assert same_rows >= 0.75


@pytest.mark.parametrize(
    ("kind", "message"), [("duo", "give gap as 8"), ("ar", "cannot fill gaps")]
)
def test_models_that_cannot_choose_a_gap_say_so(tokenizer, kind, message):
    with pytest.raises(UserError, match=message):
        make(tokenizer, kind).sample(infill="once ___ time")


def test_words_that_a_closed_vocabulary_lacks_are_named():
    tokenizer = OracleLanguage.default().tokenizer
    model, known = make(tokenizer), tokenizer.decode([5])
    with pytest.raises(UserError) as caught:
        model.sample(prompt=f"xyz {known} zzz")
    assert str(caught.value) == "The model's vocabulary has no `xyz`, `zzz`: use words it knows."
    assert int(model.sample(prompt=known, steps=2)[0, 0]) == 5
