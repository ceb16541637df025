"""``gsplit report``: measurements and runs as one page, pictures, a table and a trace file."""

__all__: list[str] = []
