"""Drawing neighbours: which in-edges of a frontier belong to a mini-batch. No communication happens here."""

__all__: list[str] = []
