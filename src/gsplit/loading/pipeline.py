"""Making batches ahead of training, in a thread of their own, without ever letting the ranks drift apart.

While the training loop works on step t, the thread makes steps t + 1 .. t + depth. Making a step takes collectives, so
what is made ahead must be the same on every rank, whatever its speed. Nothing here depends on time: taking step t
permits the steps up to t + depth, the thread makes all that is permitted and no more, and ``close`` lets it finish
them. Ranks that have taken the same steps have therefore joined the same collectives, also when the loop is left early.

An error in the thread is raised, with its own traceback, where its step would have been taken: after the steps before
it, on every rank that had the error. A thread that is waiting ends with the thread that takes: with the program.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pipeline"]

T = TypeVar("T")
_LOOK_S = 0.2  # how often a waiting thread looks whether the program has ended


class Pipeline(Generic[T]):
    """``make(step)`` for every step of a range, in order, up to ``depth`` ahead of ``take``; depth 0: no thread."""

    def __init__(self, make: Callable[[int], T], steps: range, depth: int) -> None:
        self._make, self._steps, self._depth = make, steps, depth
        self._changed = threading.Condition()
        self._made: deque[T] = deque()
        self._num_made = self._num_taken = self._num_permitted = 0
        self._error: BaseException | None = None
        self._closed = False
        self._consumer = threading.current_thread()
        self._is_running = False
        self._thread: threading.Thread | None = None

    def take(self) -> T:
        """The next step's item; waits until it is made."""
        place, self._num_taken = self._num_taken, self._num_taken + 1
        if self._depth == 0:
            return self._make(self._steps[place])
        with self._changed:
            self._consumer = threading.current_thread()
            self._num_permitted = min(place + 1 + self._depth, len(self._steps))
            self._changed.notify_all()
            self._start()
            self._changed.wait_for(lambda: self._made or self._error is not None or self._closed)
            if self._made:
                return self._made.popleft()
            raise RuntimeError("taken from a pipeline that was closed") if self._error is None else self._error

    def _start(self) -> None:
        """Have a thread; one that had ended because its consumer had is followed by another."""
        if self._is_running or self._closed or self._error is not None or self._num_made == len(self._steps):
            return
        self._thread = threading.Thread(target=self._run, name="gsplit-loader")
        self._is_running = True
        self._thread.start()

    def drain(self) -> None:
        """Wait until everything that is permitted has been made, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_made == self._num_permitted or self._error is not None)

    def close(self) -> None:
        """Let the thread finish what is permitted, and end it. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._made.clear()

    def _run(self) -> None:
        while self._wait_for_permission():
            try:
                item = self._make(self._steps[self._num_made])
            except BaseException as error:  # to be raised by ``take``, whatever it is
                with self._changed:
                    self._error, self._is_running = error, False
                    self._changed.notify_all()
                return
            with self._changed:
                self._made.append(item)
                self._num_made += 1
                self._changed.notify_all()
            del item  # or the thread would hold it while it waits

    def _wait_for_permission(self) -> bool:
        """Whether there is another step to make; False ends the thread."""
        with self._changed:
            while self._num_made >= self._num_permitted:
                if self._closed or self._num_made == len(self._steps) or not self._consumer.is_alive():
                    self._is_running = False
                    return False
                self._changed.wait(_LOOK_S)
        return True
