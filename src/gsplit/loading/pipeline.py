"""Makes batches ahead of training, in threads, and keeps the ranks in step.

While the training loop works on step t, threads make steps t + 1 .. t + depth. With k threads, thread i makes the steps
with step % k == i, in order. Making a step involves collectives, so the steps made ahead must be the same on every
rank, however fast it is, and in the same order in each thread, which has a process group of its own. Nothing here
depends on time: taking step t permits the steps up to t + depth, every thread makes all of its permitted steps and no
others, and ``close`` waits until they are made. So ranks that have taken the same steps have joined the same
collectives, also if the loop ends early.

An error in a thread is raised, with its traceback, when its step is taken, after the steps before it. That thread makes
no more steps; the others make what is permitted, as they do on ranks without the error. A waiting thread ends when the
thread that takes steps has ended, so it does not keep the program alive.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pipeline"]

T = TypeVar("T")
_POLL_S = 0.2  # how often a waiting thread checks whether the consumer is alive


class Pipeline(Generic[T]):
    """Calls ``make(step)`` for the steps of a range, up to ``depth`` steps ahead of ``take``, in ``num_threads``.

    With depth 2, ``take()`` of step 0 permits steps 0, 1 and 2, and ``take()`` of step 1 permits step 3. With depth 0
    there is no thread, and ``take`` calls ``make`` itself.
    """

    def __init__(self, make: Callable[[int], T], steps: range, depth: int, num_threads: int = 1) -> None:
        self._make = make
        self._steps = steps
        self._depth = depth
        self._changed = threading.Condition()
        self._made: dict[int, T] = {}  # by place in the range
        self._errors: dict[int, BaseException] = {}
        self._num_taken = 0
        self._num_permitted = 0
        self._closed = False
        self._consumer = threading.current_thread()
        self._workers = [_Worker(number, (number - steps.start) % num_threads) for number in range(num_threads)]

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
            self._changed.wait_for(lambda: place in self._made or self._fails_before(place) or self._closed)
            if self._fails_before(place):
                raise self._errors[min(self._errors)]
            if place in self._made:
                return self._made.pop(place)
            raise RuntimeError("take: expected an open pipeline (got a closed one). Fix: use a new iterator.")

    def _fails_before(self, place: int) -> bool:
        """Whether the step at this place, or one before it, has failed."""
        return bool(self._errors) and min(self._errors) <= place

    def _start(self) -> None:
        """Start the threads that have steps to make and do not run. They may have ended because their consumer had."""
        for worker in self._workers:
            if worker.is_running or self._closed or worker.has_failed or worker.place >= len(self._steps):
                continue
            name = "gsplit-loader" if worker.number == 0 else f"gsplit-loader-{worker.number}"
            worker.thread = threading.Thread(target=self._run, args=(worker,), name=name)
            worker.is_running = True
            worker.thread.start()

    def drain(self) -> None:
        """Wait until every thread has made all of its permitted steps, or has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(worker.has_failed or worker.place >= self._num_permitted for worker in self._workers)
            )

    def close(self) -> None:
        """Wait until the threads have made all permitted steps and have ended. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join()
        self._made.clear()
        self._errors.clear()  # their tracebacks keep batches

    def _run(self, worker: "_Worker") -> None:
        while self._wait_for_permission(worker):
            try:
                item = self._make(self._steps[worker.place])
            except BaseException as error:  # raised by ``take``
                with self._changed:
                    self._errors[worker.place] = error
                    worker.has_failed = True
                    worker.is_running = False
                    self._changed.notify_all()
                return
            with self._changed:
                self._made[worker.place] = item
                worker.place += len(self._workers)
                self._changed.notify_all()
            del item  # so that the waiting thread does not keep it in memory

    def _wait_for_permission(self, worker: "_Worker") -> bool:
        """Wait for a permitted step. Returns False if there is none and the thread should end."""
        with self._changed:
            while worker.place >= self._num_permitted:
                if self._closed or worker.place >= len(self._steps) or not self._consumer.is_alive():
                    worker.is_running = False
                    return False
                self._changed.wait(_POLL_S)
        return True


class _Worker:
    """One of the threads. ``place``: that of the next step that it makes, in the range of steps."""

    def __init__(self, number: int, place: int) -> None:
        self.number = number
        self.place = place
        self.thread: threading.Thread | None = None
        self.is_running = False
        self.has_failed = False
