"""Keyed randomness inside kernels: ``keys.scalar`` on uint64 tensors, bit for bit, and 64-bit arguments.

A 64-bit argument goes to a kernel as two signed 32-bit halves. So its type does not depend on its value, which would
compile a kernel again, and a float64 keeps all its bits, where a float argument would become a float32.
"""

import struct

import triton
import triton.language as tl

__all__ = ["bounded", "float_halves", "join", "join_float", "mix", "word_halves"]


def word_halves(word: int) -> tuple[int, int]:
    """The upper and the lower 32 bits of a word, as signed integers.

    >>> word_halves((3 << 32) + 0xFFFFFFFF)
    (3, -1)
    """
    high, low = struct.unpack("<ii", struct.pack("<Q", word & ((1 << 64) - 1)))[::-1]
    return high, low


def float_halves(value: float) -> tuple[int, int]:
    """The bits of a float64 as two halves."""
    return word_halves(struct.unpack("<Q", struct.pack("<d", value))[0])


@triton.jit
def join(high, low):
    """The int64 whose halves these are."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def join_float(high, low):
    """The float64 whose bits have these halves."""
    return join(high, low).to(tl.float64, bitcast=True)


@triton.jit
def mix(state, part):
    """See ``keys.scalar.mix``: one part, both uint64."""
    z = state + (part + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def bounded(word, bound):
    """See ``keys.scalar.bounded``: both uint64."""
    return ((word >> 32) * bound) >> 32
