"""Keyed randomness on any device: torch versions of ``keys.scalar``, equal bit for bit.

A 64-bit word is stored in an int64 tensor as its two's complement. Products wrap. A logical right shift is an
arithmetic one whose sign bits are masked. Nothing else is assumed about the device.
"""

import torch
from torch import Tensor

from gsplit.keys import scalar

__all__ = ["bounded", "mix", "neg_log2", "permute", "scaled", "unpermute"]


def _signed(word: int) -> int:
    """The int64 that has the same 64 bits as ``word``."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(scalar.GAMMA)
_M1 = _signed(0xBF58476D1CE4E5B9)
_M2 = _signed(0x94D049BB133111EB)


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix(state: Tensor | int, part: Tensor) -> Tensor:
    """A random word of 64 bits for every part of a key (``scalar.mix``), with one state for all parts or one for each.

    ``mix(mix(key, ids), positions)`` is a word for every position of every vertex, equal on all ranks and devices.
    """
    start = _signed(state) if isinstance(state, int) else state
    z = (part + 1) * _GAMMA + start
    z = (z ^ _shift(z, 30)) * _M1
    z = (z ^ _shift(z, 27)) * _M2
    return z ^ _shift(z, 31)


def bounded(word: Tensor, bound: Tensor | int) -> Tensor:
    """See ``scalar.bounded``; elementwise."""
    return _shift(_shift(word, 32) * bound, 32)


def scaled(word: Tensor, bound: int) -> Tensor:
    """``word * bound >> 64``: as ``bounded``, but uniform below bounds near 2**32, too."""
    return _shift(_shift(word, 32) * bound + _shift((word & 0xFFFFFFFF) * bound, 32), 32)


def neg_log2(words: Tensor) -> Tensor:
    """See ``scalar.neg_log2``; elementwise."""
    x = _shift(words, 11) + 1
    exponent = torch.frexp(x.double()).exponent.long() - 1  # exact: x is at most 2**53
    mantissa = (x << (53 - exponent)) & ((1 << 53) - 1)
    i = mantissa >> (53 - scalar.LOG_BITS)
    between = (mantissa >> (53 - scalar.LOG_BITS - 28)) & ((1 << 28) - 1)
    table = torch.tensor(scalar.log2_table(), dtype=torch.int64, device=words.device)
    low = table[i]
    return ((53 - exponent) << 40) - (low + (((table[i + 1] - low) * between) >> 28))


def _permute(positions: Tensor, size: int, key: int, order: list[int]) -> Tensor:
    left_bits, right_bits = scalar.halves(size)
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < size:  # device sync
        raise ValueError(
            f"positions: expected values in [0, {size}) (got {int(positions.min())}..{int(positions.max())})"
        )
    keys = scalar.round_keys(key)
    out = positions.clone()
    walking = torch.arange(out.numel(), device=out.device)
    while walking.numel():  # device sync: one per walk, a few per epoch
        value = out[walking]
        left = value >> right_bits
        right = value & ((1 << right_bits) - 1)
        for i in order:
            if i % 2 == 0:
                left = left ^ _shift(mix(keys[i], right), 64 - left_bits)
            else:
                right = right ^ _shift(mix(keys[i], left), 64 - right_bits)
        value = (left << right_bits) | right
        out[walking] = value
        walking = walking[value >= size]
    return out


def permute(positions: Tensor, size: int, key: int) -> Tensor:
    """See ``scalar.permute``; for every position of a one-dimensional int64 tensor."""
    return _permute(positions, size, key, list(range(scalar.ROUNDS)))


def unpermute(positions: Tensor, size: int, key: int) -> Tensor:
    """See ``scalar.unpermute``; for every position of a one-dimensional int64 tensor."""
    return _permute(positions, size, key, list(reversed(range(scalar.ROUNDS))))
