"""``gsplit report``: runs as one page, pictures and a trace file."""

__all__: list[str] = []
