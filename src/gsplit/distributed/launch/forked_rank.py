"""A rank as a copy of the launcher, which has imported torch and PyG already: it starts in a moment, not in 5 to 8 s.

A process can be copied if it has one thread: locks that others hold would stay locked in the copy, and OpenMP's threads
would be missing there. GPUs cannot be used in a copy of a process that has looked for them, so their ranks are not
copies. What a Python of its own would have, the copy is given: its environment, number of threads, allocator settings,
signal handlers and functions to call at its end.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from gsplit.distributed.launch.allocator import tune_allocator

__all__ = ["ForkedRank", "can_fork", "end_process", "exit_code", "fork_rank", "stay_with_one_thread"]


def stay_with_one_thread() -> None:
    """Keep torch from starting threads in this process, so that it can be forked."""
    import torch

    torch.set_num_threads(1)


def can_fork(device: str | None) -> bool:
    """Whether ranks on this kind of device can be copies of this process, as it is now; None: GPUs if there are any."""
    import torch

    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    return on_cpu and len(list(Path("/proc/self/task").iterdir())) == 1


class ForkedRank:
    """A process that was forked; as much of ``subprocess.Popen`` as the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended: its number may be another's then."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def fork_rank(main: Callable[[], int], environment: Mapping[str, str]) -> ForkedRank:
    """Run ``main`` as a rank, in a copy of this process with another environment; its result is the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # or the garbage collector of every rank would write to, and so copy, the memory that they share
    pid = os.fork()
    if pid == 0:
        _be_rank(main, environment)
    gc.unfreeze()  # or extension modules would report what is left of them when this process ends
    return ForkedRank(pid)


def _be_rank(main: Callable[[], int], environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        atexit._clear()  # those are the launcher's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        _tune(environment)
        code = main()
    except SystemExit as end:
        code = exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:  # without unwinding the launcher's calls, which this is a copy of
        end_process(code)


def exit_code(end: SystemExit) -> int:
    """The exit code of a process that ends with ``SystemExit``."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter would, but do not destroy its modules and objects.

    Destroying those of torch and PyG takes a second, and extension modules report what another still refers to.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a closed pipe or file; the interpreter ends with 120, too
                code = code or 120
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed
    finally:
        os._exit(code)


def _tune(environment: Mapping[str, str]) -> None:
    """What libraries read from the environment when they are loaded, which has happened."""
    import torch

    threads = environment["OMP_NUM_THREADS"].partition(",")[0]  # OpenMP takes a number for every level of nesting
    torch.set_num_threads(int(threads))
    tune_allocator(environment)
