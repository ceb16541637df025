"""Partitioning a store that exists only as shards, by ranks that each hold one of them."""

__all__: list[str] = []
