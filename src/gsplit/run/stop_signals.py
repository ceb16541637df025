"""SIGTERM and Ctrl-C during training: not the end at once, but a request to stop after the step and to save.

A process that a user started ends at the second signal, as it would have at the first. Ranks of a launcher get a signal
from the terminal and from the launcher: they take the first, and the launcher ends those that take too long.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_signals"]


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call ``request_stop`` when this process is told to end; only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_launched = "RANK" in os.environ

    def stop(signum: int, frame: FrameType | None) -> None:
        request_stop()
        if not is_launched:
            restore()

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        yield
    finally:
        restore()
