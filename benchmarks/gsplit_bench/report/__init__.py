"""``python -m gsplit_bench report``: records of benchmarks, and runs beside them, as one page, pictures and a table."""

__all__: list[str] = []
