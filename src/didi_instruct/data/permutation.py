"""A shuffled order that needs no memory: the place of any row can be computed on its own."""

import hashlib

import numpy as np

_ROUNDS = 8


def permute(positions: np.ndarray, size: int, key: str) -> np.ndarray:
    """Map positions in [0, size) one to one to [0, size), in an order that `key` decides.

    A Feistel network is a bijection of numbers of an even number of bits, whatever its round
    function. Where the image is `size` or more it is mapped again (cycle walking) until it is not:
    the walk ends because it would come back to its start otherwise. At least a quarter of the
    domain is in range, so a walk takes four steps on average at worst.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    keys = _round_keys(key)
    values = positions.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], half, keys)
        walking = walking[values[walking] >= size]
    return values.astype(np.int64)


def shuffled(start: int, count: int, size: int, seed: int) -> np.ndarray:
    """Indices in [0, size) of rows start .. start + count - 1 of an endless shuffled stream.

    Row i depends on (seed, i) alone; every epoch has another order.
    """
    epochs, positions = np.divmod(np.arange(start, start + count), size)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = permute(positions[now], size, f"{seed}:{epoch}")
    return indices


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _round_keys(key: str) -> np.ndarray:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8")
