"""A compiled trunk has the gradients of a plain one."""

import copy

import pytest
import torch

from didi_instruct.config.model import ModelConfig
from didi_instruct.models.dit import DiT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("batch", "length", "hidden"), [(128, 256, 256), (32, 1024, 128)])
def test_gradients_of_a_compiled_trunk(batch, length, hidden):
    """In float32. At these sizes inductor's mix-order reduction was wrong by orders of magnitude.

    Small models did not show it: the kernel is chosen where there are many rows.
    """
    torch.manual_seed(0)
    config = ModelConfig(
        layers=4, hidden=hidden, heads=2, cond_dim=8, vocab_size=65, length=length,
        learned_positions=True,
    )  # fmt: skip
    plain = DiT(config).cuda()
    for parameter in plain.parameters():  # modulations are zero at first
        torch.nn.init.normal_(parameter, std=0.05)
    fast = copy.deepcopy(plain)
    fast.compile_trunk()
    tokens = torch.randint(64, (batch, length), device="cuda")
    weight = torch.randn(batch, length, hidden, device="cuda")
    for network in (plain, fast):
        (network.trunk(tokens) * weight).mean().backward()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if a.grad is not None:
            gap = (a.grad - b.grad).norm() / a.grad.norm().clamp_min(1e-12)
            assert gap < 1e-2, f"{name}: {gap:.2g}"
