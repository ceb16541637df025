"""Randomness without state (law 1): a random number is a hash of its key.

There are three implementations of the same functions, which are equal bit for bit (tests/unit/keys):

- ``scalar``: Python integers. The definition; also used for the few keys of a step.
- ``kernels_numba``: arrays on the host, and scalars inside other host kernels.
- ``kernels_torch``: int64 tensors on any device, with wrapping products and masked shifts.

``mix(state, part)`` is the value at position ``part`` of the SplitMix64 stream that starts at ``state`` (Steele, Lea
and Flood, OOPSLA 2014): ``finalise(state + (part + 1) * GAMMA) mod 2**64``. So different parts of one state never
collide, and there are published test values. Longer keys are chained: ``mix(mix(seed, epoch), step)``.
"""

__all__: list[str] = []
