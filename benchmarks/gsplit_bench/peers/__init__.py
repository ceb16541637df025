"""Other systems, run as their users run them: on the ranks of the same run."""

__all__: list[str] = []
