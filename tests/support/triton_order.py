"""Triton's interpreter with its programs in another order: it runs them in sequence, which a device does not.

A kernel whose result depends on which program runs first passes in one order and fails in another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
from triton.runtime.interpreter import interpreter_builder as builder


@contextmanager
def program_order(seed: int) -> Iterator[list[list[int]]]:
    """Run every grid in an order drawn from ``seed``, 0 for the usual one; yields the orders, launch by launch."""
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    rng = np.random.default_rng(seed)
    orders: list[list[int]] = []
    number_of: dict[tuple[int, ...], int] = {}
    places: list[tuple[int, ...]] = []

    def shuffled_dim(*grid: int) -> None:
        places[:] = product(*(range(size) for size in grid))
        number_of.update((place, number) for number, place in enumerate(places))
        orders.append(list(range(len(places))) if seed == 0 else rng.permutation(len(places)).tolist())
        set_dim(*grid)

    def shuffled_idx(*place: int) -> None:
        set_idx(*places[orders[-1][number_of[place]]])

    builder.set_grid_dim, builder.set_grid_idx = shuffled_dim, shuffled_idx
    try:
        yield orders
    finally:
        builder.set_grid_dim, builder.set_grid_idx = set_dim, set_idx
