"""Compiled host kernels: how they are compiled, moving rows, and buffers that are reused."""

__all__: list[str] = []
