"""The planner: estimates the time of a step under every strategy and chooses the fastest."""

__all__: list[str] = []
