"""Random numbers that belong to a sample, not to a batch.

Uniform i of a stream of sample k is a hash of (seed, k, stream, i), so a sample gets the same noise
in whatever batch, order or device it is drawn. The hash is the finaliser of SplitMix64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from didi_instruct.models.compile import Fused, fuses
from didi_instruct.transfer import sent

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def uniforms(
    seed: int | Tensor, samples: Tensor, stream: tuple[int | Tensor, ...], count: int
) -> Tensor:
    """Uniform float64 numbers in [0, 1) with 53 random bits.

    The seed may be its `seed_key` as a tensor (1,), for a graph that serves all seeds. `stream`
    says what the numbers are for: (purpose, step, …), any whole numbers; or tensors of them, such
    as (N, 1) for N steps at once.

    Shapes: samples (B,) int64, the index of each sample -> (B, count), or (N, B, count).
    """
    position = torch.arange(1, count + 1, device=samples.device)
    turns = [_GOLDEN * (number + 1) for number in stream]
    numbers = [turn if isinstance(turn, Tensor) else _signed(turn) for turn in turns]
    numbers = [seed if isinstance(seed, Tensor) else seed_key(seed), *numbers]
    if fuses(samples) and not any(isinstance(number, Tensor) for number in numbers):
        # Numbers in a tensor, for which nothing is compiled anew.
        return _fused(samples, sent(torch.tensor(numbers), samples.device), position)
    return _uniforms(samples, numbers, position)


def _uniforms(samples: Tensor, numbers: Sequence[int | Tensor], position: Tensor) -> Tensor:
    key = _hash(numbers[0] + _GOLDEN * (samples + 1))
    for number in numbers[1:]:
        key = _hash(key + number)
    bits = _hash(key[..., None] + _GOLDEN * position)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _uniforms_of(samples: Tensor, numbers: Tensor, position: Tensor) -> Tensor:
    return _uniforms(samples, numbers.unbind(), position)


_fused: Fused[[Tensor, Tensor, Tensor], Tensor] = Fused(_uniforms_of, "Noise")


def seed_key(seed: int) -> int:
    """What a seed is to the hash."""
    return _signed(_hash_number(seed))


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _hash_number(number: int) -> int:
    """`_hash` of one number, for which a GPU would be kept waiting."""
    x, whole = number % (1 << 64), (1 << 64) - 1
    x = (x ^ (x >> 30)) * _FIRST & whole
    x = (x ^ (x >> 27)) * _SECOND & whole
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right filling with zeros; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Wrap any whole number into a signed 64-bit one, as torch does with tensors."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number
