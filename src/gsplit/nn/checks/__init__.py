"""Checks of a model when it is wrapped, by running it on small mini-batches."""

__all__: list[str] = []
