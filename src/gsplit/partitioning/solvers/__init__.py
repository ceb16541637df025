"""Partitioners behind one interface, each in a process of its own."""

__all__: list[str] = []
