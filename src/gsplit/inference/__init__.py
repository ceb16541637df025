"""Exact inference: outputs of vertices from all their neighbours, in bounded memory, on any number of ranks."""

__all__: list[str] = []
