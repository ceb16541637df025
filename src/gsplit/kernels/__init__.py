"""Compiled host kernels: which is used when, how they are compiled, moving rows, and buffers that are reused."""

__all__: list[str] = []
