"""The command line: a thin skin over the library. Progress and prose on stderr, ``--json`` alone on stdout."""

import os

__all__: list[str] = []

# Before numpy is imported: ranks are copies of this process if it has one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
