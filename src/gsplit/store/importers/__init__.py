"""Importers: each turns one kind of input into a ``GraphSource`` that ``build_store`` can read in pieces."""

__all__: list[str] = []
