"""Importers: each reads one kind of input as a ``GraphSource`` for ``build_store``."""

__all__: list[str] = []
