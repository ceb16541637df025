"""Keyed randomness: three versions, one answer; and the answer looks random where it must."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from gsplit.kernels.jit import kernel
from gsplit.keys import kernels_numba, kernels_torch, scalar

WORDS = st.integers(0, 2**64 - 1)
PARTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
SIGNIFICANCE = 1e-4  # keys are fixed, so a test that passes once passes always


def assert_uniform(counts: np.ndarray, expected: float, lost_freedom: int = 1) -> None:
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, counts.size - lost_freedom) > SIGNIFICANCE
    assert chi2.cdf(statistic, counts.size - lost_freedom) > SIGNIFICANCE  # nor too even to be random


def test_known_answers_of_splitmix64() -> None:
    stream = [scalar.mix(1234567, i) for i in range(5)]
    assert stream == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(WORDS, PARTS)
def test_mix_is_the_same_three_times(state: int, parts: list[int]) -> None:
    array = np.array(parts, np.int64)
    expected = [scalar.mix(state, part) for part in parts]
    assert kernels_numba.mix_array(state, array).tolist() == expected
    tensor = kernels_torch.mix(state, torch.from_numpy(array))
    assert tensor.numpy().view(np.uint64).tolist() == expected
    assert [int(kernels_numba.mix(np.uint64(state), np.uint64(p % 2**64))) for p in parts] == expected


@given(st.lists(WORDS, min_size=1, max_size=20), st.integers(1, 2**32 - 1))
def test_bounded_is_the_same_three_times_and_in_range(words: list[int], bound: int) -> None:
    expected = [scalar.bounded(word, bound) for word in words]
    assert all(0 <= value < bound for value in expected)
    assert [int(kernels_numba.bounded(np.uint64(w), np.uint64(bound))) for w in words] == expected
    tensor = torch.from_numpy(np.array(words, np.uint64).view(np.int64))
    assert kernels_torch.bounded(tensor, bound).tolist() == expected
    assert kernels_torch.bounded(tensor, torch.full_like(tensor, bound)).tolist() == expected
    assert kernels_torch.scaled(tensor, bound).tolist() == [scalar.scaled(word, bound) for word in words]


@kernel
def _neg_log2_array(words: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.empty(words.size, np.int64)
    for i in range(words.size):
        out[i] = kernels_numba.neg_log2(words[i], table)
    return out


def test_the_logarithm_is_the_same_three_times_and_close() -> None:
    words = kernels_numba.mix_array(7, np.arange(200_000))
    powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
    words = np.concatenate([words, powers, powers - np.uint64(1), np.array([2**64 - 1, 2**64 - 2049], np.uint64)])
    found = _neg_log2_array(words, kernels_numba.log2_table())
    assert np.array_equal(found, kernels_torch.neg_log2(torch.from_numpy(words.view(np.int64))).numpy())
    assert found[-10_000:].tolist() == [scalar.neg_log2(int(word)) for word in words[-10_000:]]
    u = ((words >> np.uint64(11)).astype(np.float64) + 1) / 2**53
    assert np.abs(found / 2.0**40 + np.log2(u)).max() < 1.1e-8
    assert found.min() == 0 and found.max() == 53 << 40
    assert (found >= 1.44 * (1 - u) * 2**40 - 2).all()  # the bound by which weighted draws skip edges
    table = [math.log2(1 + i / 4096) * 2**40 for i in range(4097)]
    assert np.abs(np.array(scalar.log2_table()) - table).max() < 0.51


@given(st.integers(1, 2**62), WORDS, st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_permutation_is_the_same_three_times_and_inverts(size: int, key: int, shares: list[float]) -> None:
    positions = [min(int(share * size), size - 1) for share in shares]
    expected = [scalar.permute(p, size, key) for p in positions]
    assert all(0 <= image < size for image in expected)
    assert [scalar.unpermute(image, size, key) for image in expected] == positions
    array, images = np.array(positions), np.array(expected)
    assert kernels_numba.permute(array, size, key).tolist() == expected
    assert kernels_numba.unpermute(images, size, key).tolist() == positions
    assert kernels_torch.permute(torch.from_numpy(array), size, key).tolist() == expected
    assert kernels_torch.unpermute(torch.from_numpy(images), size, key).tolist() == positions


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4096, 4097, 65537, 10**6])
def test_permutation_is_a_bijection(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        images = kernels_numba.permute(np.arange(size), size, key)
        assert np.array_equal(np.sort(images), np.arange(size))
        assert np.array_equal(kernels_numba.unpermute(images, size, key), np.arange(size))


def test_permutation_inverts_at_random_points_up_to_a_trillion() -> None:
    for size in (10**9, 10**12 - 1, 10**12):
        points = (kernels_numba.mix_array(size, np.arange(20_000)) % np.uint64(size)).astype(np.int64)
        images = kernels_numba.permute(points, size, 99)
        assert np.array_equal(kernels_numba.unpermute(images, size, 99), points)
        assert np.array_equal(kernels_torch.permute(torch.from_numpy(points), size, 99).numpy(), images)
        assert_uniform(np.bincount(images * 64 // size, minlength=64), images.size / 64)


@pytest.mark.parametrize("module", [kernels_numba, kernels_torch])
def test_permutation_refuses_positions_outside(module: object) -> None:
    make = np.array if module is kernels_numba else torch.tensor
    for bad in ([-1], [10]):
        with pytest.raises(ValueError, match=r"positions: expected values in \[0, 10\)"):
            module.permute(make(bad), 10, 0)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"size: expected 1 to 2\*\*62 \(got 0\)"):
        scalar.permute(0, 0, 0)


@pytest.mark.parametrize("size, keys", [(50, 40_000), (64, 20_000), (100, 20_000), (257, 4_000)])
def test_permutation_is_uniform_over_keys(size: int, keys: int) -> None:
    images = np.stack([kernels_numba.permute(np.arange(size), size, scalar.mix(11, k)) for k in range(keys)])
    table = np.stack([np.bincount(images[:, p], minlength=size) for p in range(size)])
    assert_uniform(table.reshape(-1), keys / size, lost_freedom=2 * size - 1)
    steps = (images[:, 1:] - images[:, :-1]) % size  # where the next position goes, seen from this one
    assert_uniform(np.bincount(steps.reshape(-1), minlength=size)[1:], steps.size / (size - 1))
    pairs = np.bincount(images[:, 0] * size + images[:, 1], minlength=size * size)
    off_diagonal = pairs[~np.eye(size, dtype=bool).reshape(-1)]
    if keys / off_diagonal.size >= 5:
        assert_uniform(off_diagonal, keys / off_diagonal.size)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_is_equally_likely(size: int) -> None:
    number = {order: i for i, order in enumerate(permutations(range(size)))}
    keys = 200 * math.factorial(size)
    drawn = [
        number[tuple(kernels_numba.permute(np.arange(size), size, scalar.mix(5, k)).tolist())] for k in range(keys)
    ]
    assert_uniform(np.bincount(drawn, minlength=len(number)), 200)


def test_words_are_uniform_over_buckets_at_both_ends() -> None:
    words = kernels_numba.mix_array(7, np.arange(1 << 20))
    for bits in (words >> np.uint64(54), words & np.uint64(1023)):
        assert_uniform(np.bincount(bits.astype(np.int64), minlength=1024), words.size / 1024)
    bounded = (words >> np.uint64(32)) * np.uint64(1000) >> np.uint64(32)
    assert_uniform(np.bincount(bounded.astype(np.int64), minlength=1000), words.size / 1000)


@pytest.mark.parametrize("gap", [1, 2, 3, 64, 1 << 32])
def test_neighbouring_keys_are_independent(gap: int) -> None:
    """Pairs of hashes of parts, and of states, that differ by ``gap`` fill a 32 x 32 table evenly."""
    parts = np.arange(1 << 19)
    first = kernels_numba.mix_array(3, parts) >> np.uint64(59)
    by_part = kernels_numba.mix_array(3, parts + gap) >> np.uint64(59)
    by_state = kernels_numba.mix_array(3 + gap, parts) >> np.uint64(59)
    for other in (by_part, by_state):
        table = np.bincount((first * np.uint64(32) + other).astype(np.int64), minlength=1024)
        assert_uniform(table, parts.size / 1024)


def test_avalanche() -> None:
    """Flipping any one bit of the part or of the state flips every output bit half of the time."""
    trials = 4096
    parts = kernels_numba.mix_array(1, np.arange(trials)).view(np.int64)
    low, high = binom.ppf([1e-8, 1 - 1e-8], trials, 0.5)  # 2 x 64 x 64 counts
    plain = kernels_numba.mix_array(17, parts)
    for bit in range(64):
        flip = np.uint64(1) << np.uint64(bit)
        flipped_parts = (parts.view(np.uint64) ^ flip).view(np.int64)
        flipped_state = 17 ^ (1 << bit)
        for other in (kernels_numba.mix_array(17, flipped_parts), kernels_numba.mix_array(flipped_state, parts)):
            changed = np.unpackbits((plain ^ other).view(np.uint8)).reshape(trials, 64).sum(axis=0)
            assert changed.min() >= low
            assert changed.max() <= high
