"""The definition of keyed randomness, on Python integers.

Used for the few scalar keys of a step, and as the reference in tests of the two array versions.
"""

__all__ = ["GAMMA", "MAX_SIZE", "MIN_BITS", "ROUNDS", "bounded", "mix", "permute", "round_keys", "unpermute"]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
ROUNDS = 10
"""Feistel rounds, as many as in FF1, the NIST standard for small domains. Eight pass all tests too."""
MIN_BITS = 8
"""The smallest Feistel domain is 2**8: on smaller ones ten rounds do not produce all permutations evenly."""
MAX_SIZE = 1 << 62


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
