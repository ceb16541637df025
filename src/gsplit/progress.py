"""Progress of long operations.

A stage calls its ``Progress`` with its name, the units done so far and the total (None while it is unknown). The
command line draws bars from these calls. The default, ``silent``, ignores them.
"""

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """Receives ``(stage, done, total)``; ``done`` counts from the start of the stage."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Receive the state of one stage."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore all calls."""
