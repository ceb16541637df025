"""An allocator that keeps its memory, for ranks on the CPU.

glibc gives large blocks back to the kernel after every step, and page faults on fresh memory then cost a third to a
half of the CPU seconds of a step. Told to keep them, a process takes up to 1.6 times the memory (docs/performance.md).
"""

import ctypes
import os
from collections.abc import Mapping

__all__ = ["ALLOCATOR", "tune_allocator"]

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}
"""The settings as environment variables, which glibc reads when a process starts."""

_PARAMETERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_MAX_": -4}
_MOST = 2**31 - 1  # mallopt takes an int; -1 as a threshold is larger than any


def tune_allocator(settings: Mapping[str, str] | None = None) -> None:
    """The same for a process that has started, but for what its environment says; without glibc, nothing.

    ``settings``: other variables, as another environment would have them.
    """
    if settings is None:
        settings = {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
    libc = ctypes.CDLL(None)
    for name, parameter in _PARAMETERS.items() if hasattr(libc, "mallopt") else ():
        if settings.get(name, "").isdecimal():  # glibc passes over what is no number, too
            libc.mallopt(parameter, value if (value := int(settings[name])) <= _MOST else -1)
