import pytest
import torch

from didi_instruct.distillation.losses import advantages, rewards


def random_rewards(count=12, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_reward_is_the_mean_over_masks_or_over_what_was_written():
    generator = torch.Generator().manual_seed(1)
    log_ratio = torch.randn(40, 6, generator=generator)
    written = torch.rand(40, 6, generator=generator) < 0.7
    written[:, 0] = True
    masked = written & (torch.rand(40, 6, generator=generator) < 0.3)
    none = ~masked.any(1)
    assert 0 < none.sum() < 40
    expected = [
        sum(v for v, chosen in zip(row, mask if any(mask) else wrote, strict=True) if chosen)
        / sum(mask if any(mask) else wrote)
        for row, mask, wrote in zip(
            log_ratio.tolist(), masked.tolist(), written.tolist(), strict=True
        )
    ]
    torch.testing.assert_close(rewards(log_ratio, masked, written), torch.tensor(expected))


def test_what_is_not_masked_cannot_touch_a_reward():
    """Not even if it is not a number."""
    log_ratio = torch.tensor([[1.0, torch.nan, 3.0, torch.inf]])
    masked = torch.tensor([[True, False, True, False]])
    assert rewards(log_ratio, masked, torch.ones_like(masked)).tolist() == [2.0]


def test_mean_and_group_standardise_with_the_population_variance():
    """Eq. (7): (R - mean) / sqrt(mean squared deviation) in each group of consecutive texts."""
    reward = random_rewards()
    values = advantages(reward, 4, eps=0.0).values
    for group in range(3):
        part = reward[4 * group : 4 * group + 4]
        expected = (part - part.mean()) / part.std(correction=0)
        torch.testing.assert_close(values[4 * group : 4 * group + 4], expected)


@pytest.mark.parametrize("size", [2, 3, 6, 12])
def test_leave_one_out_compares_with_the_others(size):
    reward = random_rewards()
    values = advantages(reward, size, baseline="leave-one-out", scale="none").values
    for i in range(12):
        first = i // size * size
        others = [reward[j] for j in range(first, first + size) if j != i]
        assert values[i].item() == pytest.approx(float(reward[i] - sum(others) / len(others)))


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_scales(baseline):
    """Centred rewards over the spread of their group, over that of all centred ones, or as is."""
    reward = random_rewards() * torch.tensor([1.0, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]) + 4
    plain = advantages(reward, 4, baseline=baseline, scale="none").values
    centred = reward.view(3, 4) - reward.view(3, 4).mean(1, keepdim=True)
    factor = 1.0 if baseline == "mean" else 4 / 3
    torch.testing.assert_close(plain, factor * centred.flatten())
    by_group = centred.square().mean(1, keepdim=True).sqrt() + 0.1
    by_batch = centred.square().mean().sqrt() + 0.1
    for scale, spread in (("group", by_group), ("batch", by_batch)):
        values = advantages(reward, 4, baseline=baseline, scale=scale, eps=0.1).values
        torch.testing.assert_close(values, (factor * centred / spread).flatten())


def test_groups_are_consecutive_texts():
    """A shift of one group's rewards changes nothing; one of the first of each group does."""
    reward, every_fourth = random_rewards(), torch.arange(12) % 4 == 0
    values = advantages(reward, 4).values
    torch.testing.assert_close(advantages(reward + torch.arange(12) // 4, 4).values, values)
    assert not torch.allclose(advantages(reward + every_fourth, 4).values, values, atol=0.1)


def test_equal_rewards_have_no_advantage():
    """A spread of zero is no division by zero."""
    assert torch.equal(advantages(torch.full((8,), 0.3), 4).values, torch.zeros(8).double())


def test_clipping_and_its_share():
    reward = torch.tensor([0.0] * 15 + [10.0])
    free = advantages(reward, 16, eps=0.0)
    assert free.values[-1].item() == pytest.approx(15**0.5)
    assert free.clip_fraction.item() == 0
    clipped = advantages(reward, 16, eps=0.0, clip=2.0)
    torch.testing.assert_close(clipped.values, free.values.clamp(-2, 2))
    assert clipped.clip_fraction.item() == 1 / 16
    below = advantages(-reward, 16, eps=0.0, clip=2.0)
    assert below.values[-1].item() == -2
    assert below.clip_fraction.item() == 1 / 16
    assert advantages(reward, 16, clip=5.0).clip_fraction.item() == 0
