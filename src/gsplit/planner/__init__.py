"""The planner: what a step costs under every strategy, from counts and a machine's constants, and which to choose."""

__all__: list[str] = []
