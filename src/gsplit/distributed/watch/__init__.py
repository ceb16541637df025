"""Watching ranks: who is late, stopped, or in another collective."""

__all__: list[str] = []
