"""The rivals of a sampler are what they claim to be."""

import pytest
import torch

from didi_instruct.benchmarking.bench import make_rows
from didi_instruct.benchmarking.isolated import Isolated
from didi_instruct.benchmarking.rivals import (
    TransformersDecoder,
    ar_case,
    fill_zeros,
    left_to_right,
    transformers_case,
    trunk_case,
)
from didi_instruct.benchmarking.timing import time_cases
from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import DiT
from didi_instruct.sampling.engines.cuda import StaticDecoder


def shape(**changes):
    settings = {"layers": 2, "hidden": 32, "heads": 2, "cond_dim": 8, "vocab_size": 38}
    return ModelConfig(**(settings | {"length": 12} | changes))


@pytest.mark.parametrize("fast", [True, False])
def test_transformers_writes_as_many_tokens(fast, monkeypatch):
    """Of a model of the same shape, and those that are most probable; on a CPU uncompiled."""
    from transformers import GPT2LMHeadModel

    written, asked, generate = [], [], GPT2LMHeadModel.generate

    def watched(*arguments, **options):
        asked.append(options)
        written.append(generate(*arguments, **options))

    monkeypatch.setattr(GPT2LMHeadModel, "generate", watched)
    decoder = TransformersDecoder(shape(), 3, 12, torch.float32, torch.device("cpu"), fast)
    decoder(0)
    model, (tokens,) = decoder.model, written
    assert tokens.shape == (3, 13)  # and the start
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    assert torch.equal(logits.argmax(-1), tokens[:, 1:])
    assert logits.shape[-1] == 37
    assert asked[0]["cache_implementation"] == ("static" if fast else None)
    assert asked[0]["disable_compile"] != fast
    assert (model.config.n_head, model.config.n_layer) == (2, 2)
    trunk = sum(p.numel() for p in DiT(shape()).blocks.parameters())
    assert sum(p.numel() for p in model.transformer.h.parameters()) == pytest.approx(trunk, rel=0.2)


def test_transformers_that_compiles_runs_apart():
    """For real, since all that it needs has to reach the other process; beside a row of ours."""
    start = torch.zeros(3, 12, dtype=torch.long)
    plain = transformers_case(shape(), start, torch.float32, fast=False)
    assert (plain.steps, plain.note, len(plain.networks)) == (12, None, 1)
    case = transformers_case(shape(), start, torch.float32, fast=True)
    assert isinstance(case.run, Isolated)
    assert (case.name, case.steps, case.networks) == ("transformers", 12, ())
    cases = [plain, case]
    rows = make_rows(cases, time_cases(cases, 1, torch.device("cpu")))
    assert rows[1]["seconds_median"] > 0
    assert "process of its own" in rows[1]["note"]


def test_the_rival_has_the_trunk_and_the_tokens_of_the_model():
    config = shape(masks=4, order="streams", time_conditioning=True)
    rival = left_to_right(config)
    assert rival.num_tokens == config.num_tokens == 34
    same = ("layers", "hidden", "heads", "length")
    assert [getattr(rival, n) for n in same] == [getattr(config, n) for n in same]
    windows = shape(end_id=0, lengths=(0, *[1] * 12))
    assert left_to_right(windows).end_id is None


def test_the_floor_runs_as_many_passes_as_there_are_steps(monkeypatch):
    network = DiT(shape()).eval()
    seen = []
    plain = network.trunk
    monkeypatch.setattr(network, "trunk", lambda x, mods: seen.append(x.shape) or plain(x, mods))
    counts = [5]
    case = trunk_case(network, torch.full((3, 12), 37), lambda: counts[0], fast=False)
    assert case.run(0) == 5
    assert seen == [(3, 12, 32)] * 5
    assert (case.name, case.batch, case.length, case.steps) == ("trunk", 3, 12, 5)
    counts[0] = 2  # what the sampler tells once it has run
    assert case.run(1) == 2
    assert len(seen) == 7


@pytest.mark.parametrize("fast", [True, False])
def test_a_rival_takes_a_step_per_token(fast, monkeypatch):
    decoded, decode = [], StaticDecoder.decode
    monkeypatch.setattr(
        StaticDecoder, "decode", lambda *given: decoded.append(given) or decode(*given)
    )
    case = ar_case(shape(), torch.full((3, 12), 37), torch.float32, fast=fast)
    assert (case.name, case.steps, case.batch) == ("ar", 12, 3)
    case.run(0)
    assert bool(decoded) == fast


def test_no_weights_are_left_at_zero():
    network = DiT(shape())
    before = [p.clone() for p in network.parameters()]
    fill_zeros(network)
    for old, new in zip(before, network.parameters(), strict=True):
        assert new.any()
        assert not old.any() or torch.equal(old, new)
