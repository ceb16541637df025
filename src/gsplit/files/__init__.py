"""Files: atomic writes, locks, memory maps and safe parsing."""

__all__: list[str] = []
