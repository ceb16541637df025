"""Starting ranks on this host with torch's elastic launcher, the engine behind ``torchrun``.

Ranks on the CPU get one share of the cores each and an allocator that keeps its memory: glibc otherwise gives large
blocks back to the kernel after every step, and page faults on fresh memory then cost about a third of the time
(at up to 1.8 times the memory). Under torchrun, and with one process, nothing is started.

A rank reports its failure through TorchElastic's error file, so torchrun shows it too. Not with the decorator
``@record``: it lets the exception unwind, which waits for the others in their collectives; and what it calls the root
cause is the earliest by whole seconds, mostly a rank that only missed another. ``launch`` looks for the cause itself.
"""

import logging
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gsplit.errors import CommError, Terminated, explain

__all__ = ["ALLOCATOR", "DIFFERS", "launch", "report_failure"]

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}


DIFFERS = 3
"""Exit code of ranks that did their work and found that results differ."""


def report_failure(error: Exception) -> None:
    """Tell the launcher that started this rank why it fails, before the process ends."""
    get_error_handler().record_exception(error)


def _silence_elastic() -> None:
    """What failed, or that the user stopped it, is said once, by us. Every logger of TorchElastic has its own level."""
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment_of_ranks(nproc: int, *, tuned_allocator: bool, threads: int | None) -> Iterator[None]:
    """The environment that ranks start with. What the user has set stays, and afterwards all is as it was."""
    before = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    settings = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **ALLOCATOR,
    }
    os.environ.update({name: value for name, value in settings.items() if name not in before})
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not tuned_allocator:
        for name in ALLOCATOR:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(command: Sequence[str], nproc: int, *, tuned_allocator: bool = True, threads: int | None = None) -> int:
    """Run a command as ``nproc`` ranks of this host and wait; if one fails, the others are ended.

    Measurements say ``threads`` per rank, whatever the environment says, and may leave the allocator as it is.
    Returns 0, or DIFFERS if that is what the ranks ended with. What a rank could not do is this call's error.
    """
    _silence_elastic()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"timeout": timedelta(seconds=60).seconds},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        with _environment_of_ranks(nproc, tuned_allocator=tuned_allocator, threads=threads):
            elastic_launch(config, command[0])(*command[1:])
        return 0
    except SignalException as stopped:
        raise (KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated) from stopped
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == DIFFERS:
            return DIFFERS
        raise CommError(_cause(error.failures)) from error


def _cause(failures: dict[int, ProcessFailure]) -> str:
    """Which rank failed first and why: one that said so, one that was killed, or any.

    A failed collective is mostly the consequence of another rank's end, which is the better story.
    """
    told = {rank: said for rank in sorted(failures) if (said := _told(failures[rank])) is not None}
    for rank, (kind, message) in told.items():
        if kind != CommError.__name__:
            return f"rank {rank}: {message or kind}"
    killed = [r for r, failure in failures.items() if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    silent = [rank for rank in failures if rank not in told]
    if not killed and not silent:
        rank, (_, message) = next(iter(told.items()))
        return f"rank {rank}: {message}"
    rank = min(killed or silent)
    code = failures[rank].exitcode
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    fix = "see what the ranks printed above"
    if code == -signal.SIGKILL:
        fix = (
            "somebody killed it, or the kernel did when memory ran out (dmesg says so); then take a smaller mini-batch"
        )
    return explain(f"rank {rank}", "to finish", end, fix)


def _told(failure: ProcessFailure) -> tuple[str, str] | None:
    """The type of the error that a rank reported, and its message."""
    said = failure.error_file_data.get("message")
    if not isinstance(said, dict):  # a rank that reported nothing
        return None
    kind, _, message = str(said["message"]).partition(": ")
    return kind, message
