"""Collectives, process groups, shared memory between the ranks of a host, and the mesh."""

__all__: list[str] = []
