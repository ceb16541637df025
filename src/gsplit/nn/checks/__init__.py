"""What is found out about a model when it is wrapped, by trying it on small mini-batches."""

__all__: list[str] = []
