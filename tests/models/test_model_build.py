import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import count_discriminator_parameters
from didi_instruct.models.dit import (
    DiT,
    build_model,
    count_parameters,
    flops_per_token,
)

TINY = {"layers": 2, "hidden": 16, "heads": 2, "cond_dim": 8, "vocab_size": 11, "length": 12}


def test_kind_decides_the_network():
    assert type(build_model(ModelConfig(kind="mdlm", **TINY))) is DiT
    assert type(build_model(ModelConfig(kind="duo", **TINY))) is DiT
    assert type(build_model(ModelConfig(kind="ar", **TINY))) is ARModel


def test_published_counts_without_memory():
    assert count_parameters(architecture("small")) == 169_627_218
    assert count_parameters(architecture("medium")) == 424_477_010
    assert count_discriminator_parameters(architecture("small")) == 131_371_265
    assert count_discriminator_parameters(architecture("medium")) == 373_747_969
    with torch.device("meta"):
        logits = build_model(architecture("medium"))(torch.zeros(2, 1024, dtype=torch.long))
    assert logits.shape == (2, 1024, 50257)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_flops_are_those_torch_counts(kind):
    """The counter counts every product, the modulation's too: that part is known and subtracted."""
    config = ModelConfig(kind=kind, **TINY)
    model = build_model(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(3, 12, dtype=torch.long))
    d, cond = config.hidden, config.cond_dim
    modulation = 2 * (256 * cond + cond * cond + config.layers * 6 * d * cond + 2 * d * cond)
    counted = counter.get_total_flops() - modulation
    assert counted == 36 * flops_per_token(config)


def test_head_fraction_length_and_causality_enter_the_flops():
    config = ModelConfig(**TINY)
    assert flops_per_token(config) - flops_per_token(config, head_fraction=0) == 2 * 16 * 10
    shorter = flops_per_token(config) - flops_per_token(config, length=6)
    assert shorter == 2 * 4 * 6 * 16
    causal = flops_per_token(config) - flops_per_token(ModelConfig(kind="ar", **TINY))
    assert causal == 2 * 4 * (12 - 6.5) * 16
