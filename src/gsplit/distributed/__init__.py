"""Ranks: process groups, shared memory between ranks of a host, the mesh, and how ranks are started."""

__all__: list[str] = []
