"""One way to compile a host kernel.

Every numba kernel of the project goes through ``kernel``: compiled on first use, cached on disk,
released from the interpreter lock. Never ``fastmath``: it is inherited by callees and changes sums.
Kernels index only by loop counters or by values they have checked, so a damaged file cannot make
them read out of bounds.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

__all__ = ["kernel"]


P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` with numba, keeping its Python signature for the type checker."""
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # the cache cannot be written: compile in every process
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)
