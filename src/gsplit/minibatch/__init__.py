"""The mini-batch of the paper: split it, shuffle its rows, and hand it to the model."""

__all__: list[str] = []
