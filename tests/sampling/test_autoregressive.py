import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.errors import UserError
from didi_instruct.models.ar import ARModel
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.draw import DrawOptions, Purpose, invert, law_of, uniforms
from didi_instruct.sampling.state import PAD, Canvas, State

from .enumeration import all_states, assert_follows, index
from .toys import blank, start


def random_model(num_tokens, length):
    """A model of random weights, in float64 so that a cache changes no draw."""
    shape = {"layers": 2, "hidden": 16, "heads": 2, "vocab_size": num_tokens + 1}
    model = ARModel(ModelConfig(kind="ar", length=length, **shape)).double().eval()
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data = 1 + 0.2 * noise if "norm" in name else 0.5 * noise
    return model


def without_cache(model, tokens, settings):
    """Full passes, one row at a time, with the sampler's noise."""
    V = model.config.num_tokens
    result = tokens.clone()
    log_prob = torch.zeros(len(tokens), dtype=torch.float64)
    for row, text in enumerate(result):
        noise = uniforms(settings.seed, torch.tensor([row]), (Purpose.TOKEN, 0), len(text))[0]
        for i in range(len(text)):
            if text[i] == V:
                logits = model(torch.cat((torch.tensor([V]), text[:i]))[None])[:, -1]
                log_p = law_of(logits, settings)
                text[i] = invert(log_p, noise[i : i + 1])[0]
                log_prob[row] += log_p[0, text[i]]
    return result, log_prob


RAGGED = torch.tensor(
    [[9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 9, 9], [5, 9, 9, PAD, PAD, PAD], [1, 2, 3, 4, 5, 6],
     [7, 7, 9, 9, 9, PAD]]
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.8}])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2), slice(1, 5)])
def test_the_cache_changes_nothing(options, rows):
    """Prompts of several lengths in one batch; paths have the probability of what follows."""
    model, settings = random_model(9, 6), DrawOptions(seed=3, **options)
    canvas = Canvas(RAGGED[rows], 9, torch.arange(5)[rows])
    result = autoregressive(model, State(canvas, settings))
    tokens, log_prob = without_cache(model, RAGGED, settings)
    assert torch.equal(result.tokens, tokens[rows])
    torch.testing.assert_close(result.log_prob, log_prob[rows])


@torch.no_grad()
def test_the_samples_follow_the_model():
    model = random_model(3, 3)
    result = autoregressive(model, blank(20_000, 3, 3, seed=1))
    assert_follows(result.tokens, model.log_prob(all_states(3, 3)).exp(), 3)
    torch.testing.assert_close(result.log_prob, model.log_prob(result.tokens))
    assert (result.nfe, result.passes) == (3, pytest.approx(3.0))


@torch.no_grad()
def test_after_the_end_of_text_comes_nothing_else():
    """The law is the model's, with all that follows an end replaced by ends."""
    model, eot = random_model(3, 3), 1
    result = autoregressive(model, blank(20_000, 3, 3, seed=2), eot_id=eot)
    every = all_states(3, 3)
    ended = (every == eot).cumsum(1) > 0
    law = torch.zeros(27, dtype=torch.float64)
    law.index_add_(0, index(every.masked_fill(ended, eot), 3), model.log_prob(every).exp())
    assert_follows(result.tokens, law, 3)
    first = every[(every[:, 0] != eot) & (every[:, 1] == eot) & (every[:, 2] == eot)]
    for text in first:
        row = result.log_prob[(result.tokens == text).all(1)][0]
        torch.testing.assert_close(row, model.log_prob(text[None, :2])[0])


@torch.no_grad()
def test_sampling_stops_when_every_text_has_ended():
    """A model that always ends at once takes one pass."""
    model = random_model(4, 6)
    model.output_layer.linear.bias[2] = 1e4
    canvas = Canvas(torch.tensor([[2, 4, 4, 4, 4, PAD]] * 3), 4, torch.arange(3))
    seen = []
    result = autoregressive(model, start(canvas, seen.append), eot_id=2)
    assert result.tokens.tolist() == [[2, 2, 2, 2, 2, PAD]] * 3
    assert (result.nfe, result.passes, len(seen)) == (1, 1.0, 1)
    assert torch.equal(seen[0].revealed, canvas.open)
    assert autoregressive(model, start(canvas)).nfe == 4


@torch.no_grad()
def test_an_end_of_text_in_the_prompt_is_not_the_end():
    model = random_model(4, 6)
    tokens = torch.tensor([[2, 4, 4, 4, 4, 4], [2, 2, 2, 4, 4, 4]])
    canvas = Canvas(tokens, 4, torch.arange(2))
    model.output_layer.linear.bias[2] = -1e4
    result = autoregressive(model, start(canvas), eot_id=2)
    assert not (result.tokens[canvas.open] == 2).any()
    assert result.nfe == 5


@torch.no_grad()
def test_only_texts_with_something_to_write_are_run():
    model = random_model(9, 6)
    rows = []
    model.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape))
    result = autoregressive(model, start(Canvas(RAGGED[1:4], 9, torch.arange(3))))
    # The common prompt of one token in one pass, then five positions to advance.
    assert rows == [(2, 2), *[(2, 1)] * 4]
    assert result.passes == pytest.approx(5 * 2 / 3)
    assert result.nfe == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 9, 2, 9], "cannot fill a gap"),
        ([9, 9, 9, 2], "cannot fill a gap"),
        ([1, PAD, 9, 9], "padding before"),
    ],
)
def test_bad_input_is_refused(row, message):
    canvas = Canvas(torch.tensor([row]), 9, torch.arange(1))
    with pytest.raises(UserError, match=message):
        autoregressive(random_model(9, 6), start(canvas))
