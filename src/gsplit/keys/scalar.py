"""The definition of keyed randomness, on Python integers.

Used for the few scalar keys of a step, and as the reference in tests of the two array versions.
"""

import functools

__all__ = [
    "GAMMA",
    "LOG_BITS",
    "MAX_SIZE",
    "MIN_BITS",
    "ROUNDS",
    "bounded",
    "log2_table",
    "mix",
    "neg_log2",
    "permute",
    "round_keys",
    "scaled",
    "unpermute",
]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
ROUNDS = 10
"""Feistel rounds, as many as in FF1, the NIST standard for small domains. Eight pass all tests too."""
MIN_BITS = 8
"""The smallest Feistel domain is 2**8: on smaller ones ten rounds do not produce all permutations evenly."""
MAX_SIZE = 1 << 62
LOG_BITS = 12
"""``neg_log2`` interpolates between 2**12 points."""


def finalise(z: int) -> int:
    """The output function of SplitMix64: a bijection of 64-bit words; every input bit affects every output bit."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix(seed: int, *parts: int) -> int:
    """Hash a key of any length to 64 bits.

    >>> mix(1234567, 0), mix(1234567, 1)  # the published first outputs of SplitMix64 for this seed
    (6457827717110365317, 3203168211198807973)
    >>> mix(7, 3, 5) == mix(mix(7, 3), 5)
    True
    """
    state = seed & MASK
    for part in parts:
        state = finalise((state + (part + 1) * GAMMA) & MASK)
    return state


def bounded(word: int, bound: int) -> int:
    """An integer in [0, bound) from a random word, by multiply and shift. ``bound`` must be below 2**32.

    The bias is below bound / 2**32.
    """
    return ((word >> 32) * bound) >> 32


def scaled(word: int, bound: int) -> int:
    """``word * bound >> 64``: as ``bounded``, but uniform below bounds near 2**32, too.

    >>> scaled(0, 5), scaled(2**63, 5), scaled(2**64 - 1, 5)
    (0, 2, 4)
    """
    return (word * bound) >> 64


@functools.cache
def log2_table() -> tuple[int, ...]:
    """log2(1 + i / 2**12) for i = 0 .. 2**12, in units of 2**-40.

    By squaring in integers, one bit of the result at a time: the logarithm of a math library may differ in its last bit
    between machines, and then ranks would draw different edges.
    """
    fraction_bits = 80
    table = []
    for i in range(1 << LOG_BITS):
        power = ((1 << LOG_BITS) + i) << (fraction_bits - LOG_BITS)  # in [1, 2)
        bits = 0
        for _ in range(41):
            power = (power * power) >> fraction_bits
            bits <<= 1
            if power >> (fraction_bits + 1):
                power >>= 1
                bits |= 1
        table.append((bits + 1) >> 1)
    return (*table, 1 << 40)


def neg_log2(word: int) -> int:
    """-log2(u) of u = ((word >> 11) + 1) / 2**53, a uniform number in (0, 1], in units of 2**-40. Below 2**46.

    -log2(u) / w is an exponential variate of rate w, times a constant. Integers: equal on all machines and devices.

    >>> neg_log2((1 << 64) - 1), neg_log2((1 << 63) - 1) / 2**40  # u = 1 and u = 1/2
    (0, 1.0)
    """
    x = (word >> 11) + 1
    exponent = x.bit_length() - 1
    mantissa = (x << (53 - exponent)) & ((1 << 53) - 1)  # the 53 bits below the leading one
    i = mantissa >> (53 - LOG_BITS)
    between = (mantissa >> (53 - LOG_BITS - 28)) & ((1 << 28) - 1)
    table = log2_table()
    return ((53 - exponent) << 40) - (table[i] + (((table[i + 1] - table[i]) * between) >> 28))


def halves(size: int) -> tuple[int, int]:
    """The bits of the left and of the right half of the smallest Feistel domain that contains [0, size)."""
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size: expected 1 to 2**62 (got {size})")
    bits = max(MIN_BITS, (size - 1).bit_length())
    return bits // 2, bits - bits // 2


def round_keys(key: int) -> list[int]:
    """The keys of the Feistel rounds, in order."""
    return [mix(key, i) for i in range(ROUNDS)]


def _walk(position: int, size: int, key: int, order: list[int]) -> int:
    """Apply the rounds in ``order`` until the value is in [0, size) (cycle walking)."""
    left_bits, right_bits = halves(size)
    keys = round_keys(key)
    while True:
        left = position >> right_bits
        right = position & ((1 << right_bits) - 1)
        for i in order:
            if i % 2 == 0:
                left ^= mix(keys[i], right) >> (64 - left_bits)
            else:
                right ^= mix(keys[i], left) >> (64 - right_bits)
        position = (left << right_bits) | right
        if position < size:
            return position


def permute(position: int, size: int, key: int) -> int:
    """The image of ``position`` under the keyed permutation of [0, size): an unbalanced Feistel network."""
    return _walk(position, size, key, list(range(ROUNDS)))


def unpermute(position: int, size: int, key: int) -> int:
    """The inverse of ``permute``: each round is its own inverse, so the rounds run in reverse order."""
    return _walk(position, size, key, list(reversed(range(ROUNDS))))
