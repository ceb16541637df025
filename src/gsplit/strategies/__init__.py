"""How one mini-batch is divided among the ranks: strategies that compute the same step from the same sample."""

__all__: list[str] = []
