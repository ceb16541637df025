"""Keyed randomness on the host: numba versions of ``keys.scalar``, equal bit for bit.

``mix``, ``bounded`` and ``neg_log2`` take scalars and are called inside other kernels. ``mix_array``, ``permute`` and
``unpermute`` take int64 arrays. All words are uint64, because numba converts a sum of int64 and uint64 to a float.
"""

import functools

import numpy as np
import numpy.typing as npt

from gsplit.kernels.jit import kernel
from gsplit.keys import scalar

__all__ = ["bounded", "log2_table", "mix", "mix_array", "neg_log2", "permute", "unpermute"]

GAMMA = np.uint64(scalar.GAMMA)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S11 = np.uint64(11)
_S27 = np.uint64(27)
_S30 = np.uint64(30)
_S31 = np.uint64(31)
_S32 = np.uint64(32)
_ONE = np.uint64(1)


@kernel
def mix(state: np.uint64, part: np.uint64) -> np.uint64:
    """See ``scalar.mix``; one part at a time."""
    z = state + (part + _ONE) * GAMMA
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)  # type: ignore[no-any-return, unused-ignore]


@kernel
def bounded(word: np.uint64, bound: np.uint64) -> np.uint64:
    """See ``scalar.bounded``."""
    return ((word >> _S32) * bound) >> _S32  # type: ignore[no-any-return, unused-ignore]


@functools.cache
def log2_table() -> npt.NDArray[np.int64]:
    """See ``scalar.log2_table``: an argument of ``neg_log2``."""
    return np.array(scalar.log2_table(), np.int64)


@kernel
def neg_log2(word: np.uint64, table: npt.NDArray[np.int64]) -> np.int64:
    """See ``scalar.neg_log2``. The exponent of a float64 is that of the integer: integers up to 2**53 are exact."""
    x = np.int64(word >> _S11) + 1
    bits = np.float64(x).view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = (bits & ((1 << 52) - 1)) << 1
    i = mantissa >> 41
    between = (mantissa >> 13) & ((1 << 28) - 1)
    low = table[i]
    return ((53 - exponent) << 40) - (low + (((table[i + 1] - low) * between) >> 28))  # type: ignore[no-any-return, unused-ignore]


@kernel
def _mix_array(state: np.uint64, parts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    out = np.empty(parts.size, np.uint64)
    for i in range(parts.size):
        out[i] = mix(state, np.uint64(parts[i]))
    return out


@kernel
def _walk(
    positions: npt.NDArray[np.int64],
    size: np.uint64,
    left_bits: np.uint64,
    right_bits: np.uint64,
    keys: npt.NDArray[np.uint64],
    inverse: bool,
) -> npt.NDArray[np.int64]:
    out = np.empty(positions.size, np.int64)
    left_shift = np.uint64(64) - left_bits
    right_shift = np.uint64(64) - right_bits
    right_mask = (_ONE << right_bits) - _ONE
    rounds = keys.size
    for n in range(positions.size):
        value = np.uint64(positions[n])
        while True:
            left = value >> right_bits
            right = value & right_mask
            for step in range(rounds):
                i = rounds - 1 - step if inverse else step
                if i % 2 == 0:
                    left ^= mix(keys[i], right) >> left_shift
                else:
                    right ^= mix(keys[i], left) >> right_shift
            value = (left << right_bits) | right
            if value < size:
                break
        out[n] = np.int64(value)
    return out


def mix_array(state: int, parts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """``mix(state, part)`` for every part."""
    return _mix_array(np.uint64(state), parts)


def _permute(positions: npt.NDArray[np.int64], size: int, key: int, *, inverse: bool) -> npt.NDArray[np.int64]:
    left_bits, right_bits = scalar.halves(size)
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise ValueError(f"positions: expected values in [0, {size}) (got {positions.min()}..{positions.max()})")
    keys = np.array(scalar.round_keys(key), np.uint64)
    return _walk(positions, np.uint64(size), np.uint64(left_bits), np.uint64(right_bits), keys, inverse)


def permute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """See ``scalar.permute``; for every position."""
    return _permute(positions, size, key, inverse=False)


def unpermute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """See ``scalar.unpermute``; for every position."""
    return _permute(positions, size, key, inverse=True)
