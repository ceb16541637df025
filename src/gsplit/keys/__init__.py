"""Randomness without state (law 1): a random number is a hash of the key that names it.

Three implementations of the same functions, equal bit for bit (tests/unit/keys):

- ``scalar``: Python integers. The definition, and what derives the few keys of a step.
- ``kernels_numba``: arrays on the host, and scalars inside other host kernels.
- ``kernels_torch``: int64 tensors on any device, by wrapping products and masked shifts.

``mix(state, part)`` is the value at position ``part`` of the SplitMix64 stream that starts at
``state`` (Steele, Lea and Flood, OOPSLA 2014): ``finalise(state + (part + 1) * GAMMA) mod 2**64``.
So for one state different parts never collide, and known answers exist. Longer keys chain it:
``mix(mix(seed, epoch), step)``.
"""

__all__: list[str] = []
