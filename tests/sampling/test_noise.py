import pytest
import torch

from didi_instruct.models.compile import fusing
from didi_instruct.sampling.noise import uniforms


def test_a_sample_gets_the_same_noise_in_any_batch():
    whole = uniforms(7, torch.arange(10), stream=(3,), count=5)
    part = uniforms(7, torch.tensor([8, 2]), stream=(3,), count=4)
    assert torch.equal(part, whole[[8, 2], :4])


def test_seeds_samples_streams_and_positions_all_matter():
    values = [
        uniforms(seed, torch.arange(3), stream, 50)
        for seed in (0, 1, -1)
        for stream in ((0,), (1,), (0, 1), (1, 0))
    ]
    flat = torch.stack(values).flatten()
    assert len(flat.unique()) == len(flat)


def test_numbers_are_uniform_and_uncorrelated():
    """Kolmogorov-Smirnov at 1e-4 and a correlation bound of 4 standard errors (6e-5 each)."""
    table = uniforms(0, torch.arange(200), stream=(0,), count=500)
    n = table.numel()
    ordered = table.flatten().sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (ordered - grid).abs().max() < 2.2 / n**0.5
    assert ordered[0] >= 0
    assert ordered[-1] < 1
    centred = table - 0.5
    for a, b in [
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred, uniforms(0, torch.arange(200), stream=(1,), count=500) - 0.5),
        (centred, uniforms(1, torch.arange(200), stream=(0,), count=500) - 0.5),
    ]:
        assert (a * b).mean().abs() * 12 < 4 / a.numel() ** 0.5


@pytest.mark.gpu
def test_compiled_numbers_are_the_plain_ones():
    """Bit for bit, for seeds and streams of any size."""
    for samples, seed, stream, count in (
        (torch.arange(8), 7, (3,), 1024),
        (torch.arange(100, 164), 2**63 - 1, (1, 2), 77),
        (torch.tensor([8, 2]), -1, (0, 5, 9), 3),
        (torch.tensor([4]), 3, (1,), 5),
    ):
        with fusing(True):
            found = uniforms(seed, samples.cuda(), stream, count)
        assert torch.equal(found.cpu(), uniforms(seed, samples, stream, count))
