"""Memory of LLaDA and Dream: counted on the networks themselves."""

import json

import pytest
import torch
import transformers
from tests.models.causal_folders import BIDIRECTIONAL
from torch import nn
from typer.testing import CliRunner

from didi_instruct.api import budget
from didi_instruct.api.convert import convert
from didi_instruct.api.info import describe_source
from didi_instruct.cli.main import app
from didi_instruct.models.native import described

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
    shape = budget.CausalShape.of(settings, parameters, 2)
    expected = sum(16 * (m.in_features + m.out_features) for m in linear)
    assert shape.adapter(16) == expected
    assert shape.weights == 2 * parameters


def test_one_base_with_adapters_takes_a_tenth_of_three_copies():
    """Of LLaDA, rank 64: 21.4 GB of weights and adapters, where three copies need 240."""
    settings, parameters = PUBLISHED["llada"]
    shape = budget.CausalShape.of(settings, parameters, 2)
    adapters = budget.with_adapters(shape, batch=4, length=512, rank=64)
    copies = budget.three_copies(shape, batch=4, length=512)
    assert round((adapters["base"] + adapters["adapters"]) / 1e9, 1) == 21.4
    assert round((copies["weights"] + copies["optimizers"]) / 1e9) == 240
    for parts in (adapters, copies, budget.sampling(shape, batch=4, length=512)):
        assert parts["total"] == sum(parts.values()) - parts["total"]


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
