import copy

import pytest
import torch
from tests.models import masked_folders
from tests.random_models import add_noise

import didi_instruct
from didi_instruct import model as api
from didi_instruct.config.model import ModelConfig, ScheduleConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.models.dit import build_model
from didi_instruct.sampling import autoregressive


def make(kind="mdlm", **changes):
    torch.manual_seed(0)
    language = OracleLanguage.default()
    config = ModelConfig(
        kind=kind, layers=1, hidden=32, heads=2, cond_dim=8, length=32,
        vocab_size=64 if kind == "duo" else 65, schedule=ScheduleConfig(eps=1e-3), **changes,
    )  # fmt: skip
    network = add_noise(build_model(config))
    return didi_instruct.Model(network, config, language.tokenizer)


def test_a_saved_model_is_the_same_model(tmp_path):
    model = make()
    model.save(tmp_path)
    loaded = didi_instruct.load(tmp_path, device="cpu")
    tokens = torch.randint(64, (2, 32))
    ours, theirs = model.network.state_dict(), loaded.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    # Memory-mapped weights are aligned otherwise, so the last bit of a product may differ.
    torch.testing.assert_close(model.denoiser(tokens, 0.5), loaded.denoiser(tokens, 0.5))
    assert loaded.config == model.config
    assert (loaded.mask_id, loaded.discriminator) == (64, None)
    assert loaded.tokenizer.hash == model.tokenizer.hash


def test_the_denoiser_speaks_of_real_tokens_at_any_time():
    model = make(time_conditioning=True)
    tokens = torch.full((2, 32), 64)
    a = model.denoiser(tokens, 0.3)
    b = model.denoiser(tokens, torch.tensor([0.3, 0.9]))
    assert a.shape == (2, 32, 64)
    torch.testing.assert_close(a[0], b[0])
    assert not torch.allclose(a[1], b[1])


def test_the_real_time_can_be_told_to_a_model_trained_without(tmp_path):
    make().save(tmp_path)
    tokens = torch.full((1, 32), 64)
    plain = didi_instruct.load(tmp_path)
    timed = didi_instruct.load(tmp_path, time_conditioning=True)
    assert torch.equal(plain.denoiser(tokens, 0.3), plain.denoiser(tokens, 0.9))
    assert not torch.allclose(timed.denoiser(tokens, 0.3), timed.denoiser(tokens, 0.9))
    # At t = 0 sigma is 0, which is what a model without time conditioning is always told.
    torch.testing.assert_close(timed.denoiser(tokens, 0.0), plain.denoiser(tokens, 0.0))


def test_a_seed_and_an_index_give_a_sample_whatever_the_batch():
    model = make()
    whole = model.sample(num=5, steps=4, seed=3)
    assert torch.equal(whole, model.sample(num=5, steps=4, seed=3, batch_size=2))
    assert torch.equal(whole[:2], model.sample(num=2, steps=4, seed=3))
    assert not torch.equal(whole, model.sample(num=5, steps=4, seed=4))
    assert whole.shape == (5, 32)
    assert int(whole.max()) < 64
    texts = model.generate(num=2, steps=4, seed=3)
    assert [len(text.split()) for text in texts] == [32, 32]


@pytest.fixture
def decoded(monkeypatch):
    """Batches that captured decoding wrote, on a CPU that may have it."""
    seen, real = [], autoregressive._decoded
    monkeypatch.setattr(autoregressive, "_decoded", lambda *given: seen.append(1) or real(*given))
    monkeypatch.setattr(api, "why_not", lambda network: None)
    return seen


def test_an_accelerated_left_to_right_model_writes_the_same(decoded):
    model = make("ar")
    plain = model.sample(num=5, seed=3, batch_size=2)
    assert not decoded
    assert model.accelerate()
    assert model.is_accelerated
    assert torch.equal(model.sample(num=5, seed=3, batch_size=2), plain)
    assert len(decoded) == 3
    other = copy.deepcopy(model)
    assert not other.is_accelerated, "what is laid out for a machine cannot be copied"
    assert torch.equal(other.sample(num=5, seed=3), plain)


def test_the_command_decodes_by_captured_passes_unless_steps_are_traced(decoded, didi, tmp_path):
    make("ar").save(tmp_path / "ar")
    words = ("generate", tmp_path / "ar", "--num", 3, "--device", "cpu")
    code, plain, _ = didi(*words)
    assert (code, decoded) == (0, [])
    assert didi(*words, "--fast")[:2] == (0, plain)
    assert len(decoded) == 1
    assert didi(*words, "--fast", "--trace", tmp_path / "t.json")[:2] == (0, plain)
    assert len(decoded) == 1


@pytest.mark.parametrize("kind", ["mdlm", "duo", "ar"])
def test_nelbo_is_a_number_that_the_seed_fixes(kind):
    model = make(kind, time_conditioning=kind == "duo")
    tokens = torch.randint(64, (6, 32))
    bound = model.nelbo(tokens, seed=0)
    assert bound.shape == ()
    assert 3.0 < float(bound) < 8.0
    assert float(bound) == float(model.nelbo(tokens, seed=0))


def test_text_that_a_masked_lm_never_writes_has_no_likelihood(tmp_path):
    masked_folders.bert(tmp_path)
    model = didi_instruct.load(tmp_path, device="cpu")
    words = torch.tensor([[7, 8, 9], [9, 8, 7]])
    assert float(model.nelbo(words)) < 50
    words[1, 1] = tokenizer_id = model.tokenizer.vocabulary["[SEP]"]
    with pytest.raises(UserError, match=rf"1 of 6 tokens .* never writes \(id {tokenizer_id}\)"):
        model.nelbo(words)
    assert model.never_written(words).tolist() == [tokenizer_id]
    assert make().never_written(words).tolist() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.sample(num=0), "num is 0"),
        (lambda m: m.sample(length=33), "1 to 32 tokens"),
        (lambda m: m.sample(sampler="magic"), "`magic` is not a sampler"),
        (lambda m: m.sample(steps=0), "steps is 0"),
        (lambda m: m.denoiser(torch.tensor([[65]]), 0.5), "outside 0..64"),
        (lambda m: m.denoiser(torch.zeros(1, 40, dtype=torch.long), 0.5), "shape"),
    ],
)
def test_bad_requests_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call(make())
