"""Checks of a model at wrapping, by its modules and by running it on toy mini-batches."""

__all__: list[str] = []
