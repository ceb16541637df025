"""Unmodified PyG models on split mini-batches: wrapping, keyed dropout, batch norm, and averaged gradients."""

__all__: list[str] = []
