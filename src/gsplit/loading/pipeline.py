"""Makes batches ahead of training, in a thread, and keeps the ranks in step.

While the training loop works on step t, the thread makes steps t + 1 .. t + depth. Making a step involves collectives,
so the steps made ahead must be the same on every rank, however fast it is. Nothing here depends on time: taking step t
permits the steps up to t + depth, the thread makes all permitted steps and no others, and ``close`` waits until they
are made. So ranks that have taken the same steps have joined the same collectives, also if the loop ends early.

An error in the thread is raised, with its traceback, when its step is taken, after the steps before it. A waiting
thread ends when the thread that takes steps has ended, so it does not keep the program alive.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pipeline"]

T = TypeVar("T")
_POLL_S = 0.2  # how often a waiting thread checks whether the consumer is alive


class Pipeline(Generic[T]):
    """Calls ``make(step)`` for the steps of a range in order, up to ``depth`` steps ahead of ``take``.

    With depth 2, ``take()`` of step 0 permits steps 0, 1 and 2, and ``take()`` of step 1 permits step 3. With depth 0
    there is no thread, and ``take`` calls ``make`` itself.
    """

    def __init__(self, make: Callable[[int], T], steps: range, depth: int) -> None:
        self._make = make
        self._steps = steps
        self._depth = depth
        self._changed = threading.Condition()
        self._made: deque[T] = deque()
        self._num_made = 0
        self._num_taken = 0
        self._num_permitted = 0
        self._error: BaseException | None = None
        self._closed = False
        self._consumer = threading.current_thread()
        self._is_running = False
        self._thread: threading.Thread | None = None

    def take(self) -> T:
        """The item of the next step. Waits until it is made."""
        place = self._num_taken
        self._num_taken += 1
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
            if self._error is not None:
                raise self._error
            raise RuntimeError("take: expected an open pipeline (got a closed one). Fix: use a new iterator.")

    def _start(self) -> None:
        """Start a thread if there are steps to make and none runs. It may have ended because its consumer had."""
        if self._is_running or self._closed or self._error is not None or self._num_made == len(self._steps):
            return
        self._thread = threading.Thread(target=self._run, name="gsplit-loader")
        self._is_running = True
        self._thread.start()

    def drain(self) -> None:
        """Wait until all permitted steps have been made, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_made == self._num_permitted or self._error is not None)

    def close(self) -> None:
        """Wait until the thread has made all permitted steps and has ended. May be called twice."""
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
            except BaseException as error:  # raised by ``take``
                with self._changed:
                    self._error = error
                    self._is_running = False
                    self._changed.notify_all()
                return
            with self._changed:
                self._made.append(item)
                self._num_made += 1
                self._changed.notify_all()
            del item  # so that the waiting thread does not keep it in memory

    def _wait_for_permission(self) -> bool:
        """Wait for a permitted step. Returns False if there is none and the thread should end."""
        with self._changed:
            while self._num_made >= self._num_permitted:
                if self._closed or self._num_made == len(self._steps) or not self._consumer.is_alive():
                    self._is_running = False
                    return False
                self._changed.wait(_POLL_S)
        return True
