"""Other systems, run as their users run them: data parallel with torch's DDP, on the ranks of the same run."""

__all__: list[str] = []
