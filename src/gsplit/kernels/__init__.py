"""Compiled host kernels: which is used when, how they are compiled, moving rows, and buffers that are reused."""

from gsplit.errors import InputError, explain

__all__: list[str] = []

if not __debug__:  # kernels take raw addresses, and assertions check what makes these safe
    raise InputError(explain("python -O", "assertions", "none", "run without -O, and without PYTHONOPTIMIZE"))
