import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from didi_instruct.models.network import weights_stamp
from didi_instruct.training.optim import EMA


def linear(value=0.0, dtype=torch.float32):
    layer = torch.nn.Linear(2, 2, dtype=dtype)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.constant_(layer.bias, -value)
    return layer


def test_constant_decay_has_a_closed_form():
    """From 0 towards a constant 1: after n updates the average is 1 - decay^n."""
    layer = linear(0)
    ema = EMA(layer, decay=0.9)
    torch.nn.init.ones_(layer.weight)
    for step in range(1000, 1020):  # past the warm-up
        ema.update(step)
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 1 - 0.9**20))
    assert not ema.shadow["bias"].any()


def test_decay_is_warmed_up():
    """min(decay, (1 + step) / (10 + step)); the end is in the test of constant decay."""
    layer = linear(0)
    ema = EMA(layer, decay=0.9999)
    torch.nn.init.ones_(layer.weight)
    remaining = 1.0
    for step in range(30):
        ema.update(step)
        remaining *= (1 + step) / (10 + step)
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 1 - remaining))


def test_shadow_of_16_bit_parameters_is_float32():
    """Steps of 1e-3 around 1 vanish in bfloat16, and must not in the average."""
    layer = linear(1, torch.bfloat16)
    ema = EMA(layer, decay=0.999)
    torch.nn.init.constant_(layer.weight, 2)
    ema.update(10**6)
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 1.001))
    ema.copy_to(layer)
    assert layer.weight.dtype == torch.bfloat16


def test_applied_swaps_and_restores_even_after_an_error():
    """Who keeps what follows from weights sees that others take their place, and come back."""
    layer = linear(3)
    ema, before = EMA(layer), weights_stamp(layer)
    torch.nn.init.constant_(layer.weight, 7)
    with ema.applied():
        assert (layer.weight == 3).all()
        within = weights_stamp(layer)
    assert (layer.weight == 7).all()
    assert within != before
    assert weights_stamp(layer) not in (before, within)
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert (layer.weight == 7).all()
    assert (ema.shadow["weight"] == 3).all()


def test_sharded_parameters_are_averaged_shard_by_shard(tmp_path):
    """FSDP2 keeps parameters as DTensors; one process is enough to have some."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = linear(0)
        weight = distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])
        layer.weight = torch.nn.Parameter(weight)
        ema = EMA(layer, decay=0.5)
        assert isinstance(ema.shadow["weight"], DTensor)
        with torch.no_grad():
            layer.weight.to_local().fill_(1)
        ema.update(1000)
        assert (ema.shadow["weight"].full_tensor() == 0.5).all()
        with ema.applied():
            assert (layer.weight.full_tensor() == 0.5).all()
        assert (layer.weight.full_tensor() == 1).all()
        whole = linear(9)
        ema.copy_to(whole)
        assert (whole.weight == 0.5).all()
    finally:
        destroy_process_group()


def test_without_warm_up_the_closed_form_holds_from_the_first_update():
    """From 0 towards a constant 1: after n updates 1 - decay^n, with 0.9999 after 10,000 .632."""
    layer = linear(0)
    ema = EMA(layer, decay=0.9, warmup=False)
    torch.nn.init.ones_(layer.weight)
    for step in range(20):
        ema.update(step)
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 1 - 0.9**20))
    assert pytest.approx(0.632, abs=5e-4) == 1 - 0.9999**10_000, "what a recipe's comment says"
