"""Starting ranks on this host with torch's elastic launcher, the engine behind ``torchrun``.

Ranks on the CPU get one share of the cores each and an allocator that keeps its memory: glibc otherwise gives large
blocks back to the kernel after every step, and page faults on fresh memory then cost about a third of the time
(at up to 1.8 times the memory). Under torchrun, and with one process, nothing is started.
"""

import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gsplit.errors import CommError, Terminated, explain

__all__ = ["ALLOCATOR", "DIFFERS", "is_rank", "launch", "report_failure"]

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}


DIFFERS = 3
"""Exit code of ranks that did their work and found that results differ."""
_ERRORS = "GSPLIT_RANK_ERRORS"


def is_rank() -> bool:
    """Whether a launcher has started this process."""
    return os.environ.get("RANK", "").isdigit() and "WORLD_SIZE" in os.environ


def report_failure(rank: int, message: str, *, consequence: bool) -> bool:
    """Tell the process that started this rank why it fails; False if there is none, or it has ended.

    A failed collective is mostly the consequence of another rank's end, which is the better story.
    """
    folder = os.environ.get(_ERRORS)
    if folder is None or not Path(folder).is_dir():
        return False
    (Path(folder) / f"{int(consequence)}-{rank:06d}").write_text(f"rank {rank}: {message}")
    return True


def _what_ranks_said(folder: Path) -> str | None:
    causes = sorted(path for path in folder.iterdir() if path.name.startswith("0-"))
    return causes[0].read_text() if causes else None


def launch(command: Sequence[str], nproc: int) -> int:
    """Run a command as ``nproc`` ranks of this host and wait; if one fails, the others are ended.

    Returns 0, or DIFFERS if that is what the ranks ended with. What a rank could not do is this call's error.
    """
    with tempfile.TemporaryDirectory(prefix="gsplit-ranks-") as folder:
        os.environ[_ERRORS] = folder
        try:
            return _launch(command, nproc, Path(folder))
        finally:
            del os.environ[_ERRORS]


def _launch(command: Sequence[str], nproc: int, folder: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    settings = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **ALLOCATOR,
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # what the user has set stays
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what failed is said below, once
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
        elastic_launch(config, command[0])(*command[1:])
        return 0
    except SignalException as stopped:
        raise (KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated) from stopped
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == DIFFERS:
            return DIFFERS
        if said := _what_ranks_said(folder):
            raise CommError(said) from error
        for other, ended in error.failures.items():  # a rank that was killed is the cause, one that misses it is not
            if ended.exitcode < 0 and ended.exitcode != -signal.SIGTERM:
                rank, failure = other, ended
        end = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        fix = "see what the ranks printed above"
        raise CommError(explain(f"rank {rank}", "to finish", end, fix)) from error
