"""Sources of rows: features, labels and edge values, with caches and copies."""

__all__: list[str] = []
