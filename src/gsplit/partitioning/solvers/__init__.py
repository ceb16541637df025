"""Partitioners behind one interface, each run in a process of its own: METIS, Mt-KaHyPar, restreaming, random."""

__all__: list[str] = []
