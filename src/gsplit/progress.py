"""How long work tells the outside how far it is, without knowing who listens.

A stage calls its ``Progress`` with its name, the units done so far and the total (None while it is
unknown). The command line draws bars from that; a library call is silent by default.
"""

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """Receives ``(stage, done, total)``; ``done`` counts from the start of the stage."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take note of the state of one stage."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Listen to nothing."""
