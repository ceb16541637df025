"""A graph on disk: a directory of plain arrays and one manifest, checked when opened (docs/store.md)."""

__all__: list[str] = []
