"""Starting the ranks of one host, and reporting the rank that failed."""

__all__: list[str] = []
