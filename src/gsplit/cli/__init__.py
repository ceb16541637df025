"""The command line: a thin skin over the library. Progress and prose on stderr, ``--json`` alone on stdout."""

__all__: list[str] = []
