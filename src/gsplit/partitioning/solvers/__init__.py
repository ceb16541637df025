"""Partitioners behind one interface, each in a process of its own: METIS, KaMinPar, Mt-KaHyPar, restreaming, random."""

__all__: list[str] = []
