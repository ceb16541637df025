"""What the library logs while a command runs: warnings of rank 0 as notes, each once; errors of every rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

__all__ = ["library_notes"]


class _Notes(logging.Handler):
    """Shows a text once, above a progress bar if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.ERROR:
            text = f"note: {text}"
        if text not in self._said:
            self._said.add(text)
            Console(stderr=True, soft_wrap=True).print(Text(text))


def _is_news(record: logging.LogRecord) -> bool:
    """What the loader says of its start, the command has announced."""
    return record.levelno >= logging.ERROR or record.module != "loader"


@contextmanager
def library_notes(rank: int) -> Iterator[None]:
    """Show what users should know of a rank's work."""
    logger, notes = logging.getLogger("gsplit"), _Notes()
    notes.addFilter(_is_news)
    before = logger.level
    logger.setLevel(logging.ERROR if rank else logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)
        logger.setLevel(before)
