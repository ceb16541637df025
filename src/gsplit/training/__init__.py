"""Training: the step, the loop over steps, its state on disk, losses, callbacks and verification."""

__all__: list[str] = []
