"""A rank's side of the launcher: it reports its failure and status, and ends when the launcher does.

A rank reports its failure through TorchElastic's error file, so torchrun shows it too. Not with torch's decorator
``@record``: it lets the exception unwind, which waits for the others in their collectives. The rest is for ``launch``
alone, which passes the rendezvous and the status file in environment variables.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

__all__ = [
    "ERROR_FILE",
    "LAUNCHER",
    "PROCESS_NAME",
    "STATUS",
    "STATUS_BYTES",
    "STORE",
    "Status",
    "end_with_launcher",
    "fail",
    "report_failure",
    "set_status",
    "torchrun_start_s",
]

STORE = "GSPLIT_RENDEZVOUS"
"""A file that only the user's own processes can open, in which ranks of one host find each other (a FileStore)."""
STATUS = "GSPLIT_STATUS"
"""Descriptor of a file with ``STATUS_BYTES`` bytes for every rank."""
STATUS_BYTES = 8
LAUNCHER = "GSPLIT_LAUNCHER"
"""Process id of the launcher."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where TorchElastic, and ``launch``, look for a rank's error."""

PROCESS_NAME = "gsplit rank "
"""Before a rank's number, in lists of processes such as that of ``top``."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Status(StrEnum):
    """Whether a rank has joined the others."""

    STARTING = ""
    JOINING = "joining"
    JOINED = "joined"


def set_status(status: Status) -> None:
    """Report this rank's status to the launcher, if ``launch`` started it."""
    if STATUS in os.environ:
        text = status.encode().ljust(STATUS_BYTES)
        os.pwrite(int(os.environ[STATUS]), text, STATUS_BYTES * int(os.environ["RANK"]))


def end_with_launcher() -> None:
    """Have the kernel kill this process when the launcher ends, however that happens; nothing without ``launch``.

    And name it: it may be a copy of the launcher.
    """
    if LAUNCHER not in os.environ:
        return
    control = ctypes.CDLL(None, use_errno=True).prctl
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control(_PR_SET_NAME, f"{PROCESS_NAME}{os.environ['RANK']}".encode())
    if os.getppid() != int(os.environ[LAUNCHER]):  # it had ended before the kernel was asked
        os._exit(1)


def report_failure(error: BaseException) -> None:
    """Report to the launcher why this rank fails. The format is TorchElastic's."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    stack = "".join(traceback.format_exception(error))
    details = {"py_callstack": stack, "timestamp": str(int(time.time())), "time_s": time.time()}
    report = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    Path(path).write_text(json.dumps({"message": report}))


def fail(error: BaseException, exit_code: int) -> NoReturn:
    """Report an error and end the process at once.

    A clean exit would block in a collective that the other ranks never join.
    """
    report_failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def torchrun_start_s() -> float | None:
    """When the torchrun began that has started this process, in seconds since 1970; None if there is none."""
    process = os.getppid()
    with suppress(OSError, ValueError, StopIteration):
        while process > 0:  # it may be the first of a container
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            if any(word.endswith(b"torchrun") or word.startswith(b"torch.distributed.") for word in words):
                lines = Path("/proc/stat").read_text().splitlines()
                boot_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
                return boot_s + int(stat[19]) / os.sysconf("SC_CLK_TCK")
            process = int(stat[1])
    return None
