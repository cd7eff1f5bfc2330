"""Memory of LLaDA and Dream: counted on the networks themselves."""

import json
from itertools import accumulate

import pytest
import torch
import transformers
from tests.models.causal_folders import BIDIRECTIONAL
from torch import nn
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from didi_instruct.cli.main import app
from didi_instruct.config.model import ModelConfig
from didi_instruct.hub import memory
from didi_instruct.hub.export import convert
from didi_instruct.hub.info import describe_source
from didi_instruct.models.causal_lm import CAUSAL
from didi_instruct.models.masked_network import MaskedLM, SpecialIds
from didi_instruct.models.native import described
from didi_instruct.models.network import logits_at
from didi_instruct.sampling.draw import draw_tokens

PUBLISHED = {
    "llada": (
        {
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 12288,
            "vocab_size": 126464,
        },
        8_015_581_184,
    ),
    "dream": (
        {
            "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameters_and_adapters_are_those_of_the_published_networks(family):
    """On the meta device; an adapter has rank · (in + out) numbers for each linear layer."""
    settings, parameters = PUBLISHED[family]
    build, config = described(transformers, settings["model_type"], settings)
    with torch.device("meta"):
        network = build(config)
    assert sum(p.numel() for p in network.parameters()) == parameters
    linear = [m for m in network.model.layers.modules() if isinstance(m, nn.Linear)]
    assert len(linear) == 7 * settings["num_hidden_layers"]
    shape = memory.CausalShape.of(settings, parameters, 2)
    expected = sum(16 * (m.in_features + m.out_features) for m in linear)
    assert shape.adapter(16) == expected
    assert shape.weights == 2 * parameters


def test_one_base_with_adapters_takes_a_tenth_of_three_copies():
    """Of LLaDA, rank 64: 21.4 GB of weights and adapters, where three copies need 240."""
    settings, parameters = PUBLISHED["llada"]
    shape = memory.CausalShape.of(settings, parameters, 2)
    adapters = memory.with_adapters(shape, batch=4, length=512, rank=64)
    copies = memory.three_copies(shape, batch=4, length=512)
    assert round((adapters["base"] + adapters["adapters"]) / 1e9, 1) == 21.4
    assert round((copies["weights"] + copies["optimizers"]) / 1e9) == 240
    for parts in (adapters, copies):
        at_once = sum(parts.values()) - parts["total"] - min(parts["block"], parts["logits"])
        assert parts["total"] == at_once


def peak(run):
    """Most bytes that were allocated at once while something ran, beyond those before."""
    run()  # what is kept for later calls
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes))


def of_shape(width, inner, vocab_size, layers=2, batch=2, length=64):
    """A bidirectional Llama in bfloat16 with random weights, its sizes, and texts of masks."""
    settings = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": inner,
        "vocab_size": vocab_size,
    }  # fmt: skip
    build, config = described(transformers, "llama", settings)
    config._attn_implementation = "sdpa"
    network = build(config).to(torch.bfloat16).eval().requires_grad_(False)
    shape = ModelConfig(
        layers=layers, hidden=width, heads=4, vocab_size=vocab_size + 1, length=length
    )
    model = MaskedLM(network, shape, SpecialIds(0, 0, (), (), (0,)), CAUSAL["llama"])
    sizes = memory.CausalShape.of(settings, 0, 2)
    return model, sizes, torch.full((batch, length), vocab_size)


@pytest.mark.parametrize(
    ("width", "inner", "vocab_size", "reads"),
    [(256, 768, 8000, 128), (256, 768, 8000, 16), (512, 1536, 100, 128), (256, 2048, 500, 1)],
)
@torch.no_grad()
def test_the_peak_of_a_pass_is_within_a_tenth_of_its_budget(width, inner, vocab_size, reads):
    """Where a block takes most, and where logits do; allocations of a CPU, counted not timed."""
    network, shape, text = of_shape(width, inner, vocab_size)
    at = torch.arange(reads)
    measured = peak(lambda: logits_at(network, text, None, at))
    parts = memory.sampling(shape, batch=2, length=64, reads=reads)
    expected = max(parts["block"], parts["states"] + parts["logits"])
    assert measured == pytest.approx(expected, rel=0.1)


def test_the_peak_of_a_draw_is_within_a_tenth_of_its_budget():
    logits, u = torch.randn(64, 4000).bfloat16(), torch.rand(64, dtype=torch.float64)
    _, shape, _ = of_shape(16, 16, 4000)
    parts = memory.sampling(shape, batch=1, length=64)
    assert peak(lambda: draw_tokens(logits, u)) == pytest.approx(parts["draws"], rel=0.1)


@pytest.mark.parametrize(("width", "layers"), [(256, 6), (256, 2), (512, 2)])
def test_the_peak_of_a_checkpointed_pass_is_within_a_tenth_of_its_budget(width, layers):
    """Forward and backward through frozen weights, blocks computed anew."""
    network, shape, text = of_shape(width, 3 * width, 100, layers)
    network.network.gradient_checkpointing_enable()
    network.train()
    x = network.embed(text).requires_grad_()

    def run():
        x.grad = None
        network.trunk(x).sum().backward()

    parts = memory.three_copies(shape, batch=2, length=64)
    assert peak(run) == pytest.approx(parts["checkpoints"] + parts["block"], rel=0.1)


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_info_tells_mask_never_written_ids_and_memory_by_part(tmp_path, family):
    weights = BIDIRECTIONAL[family](tmp_path, dtype=torch.bfloat16)
    facts = describe_source(str(tmp_path))
    stored = sum(t.numel() for t in weights.values())
    assert (facts["architecture"].lower(), facts["layout"]) == (family, family)
    assert (facts["parameters"], facts["mask_id"], facts["never_written"]) == (stored, 16, 5)
    assert facts["bytes_sampling"]["weights"] == facts["bytes_adapters"]["base"] == 2 * stored
    assert "which the network sees as its own, 2." in facts["notes"][0]
    assert json.loads(json.dumps(facts)) == facts
    shown = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert shown.exit_code == 0
    assert "bytes adapters" in shown.stdout
    convert(tmp_path, tmp_path / "ours", "didi")
    ours = describe_source(str(tmp_path / "ours"))
    told = [name for name in facts if name.startswith(("bytes_", "never_"))]
    assert [ours[name] for name in told] == [facts[name] for name in told]
    (tmp_path / "tokenizer.json").unlink()
    assert "put the model's tokenizer.json there" in describe_source(str(tmp_path))["notes"][1]
