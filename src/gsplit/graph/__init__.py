"""A graph on one rank: vertices, owners, degrees, and the blocks of a sampled layer."""

__all__: list[str] = []
