"""From steps to batches: the loader, its plan and strategy, and the pipeline that runs ahead of training."""

__all__: list[str] = []
