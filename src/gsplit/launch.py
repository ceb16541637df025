"""Starting ranks on this host with torch's elastic launcher, the engine behind ``torchrun``.

Ranks on the CPU get one share of the cores each and an allocator that keeps its memory: glibc otherwise gives large
blocks back to the kernel after every step, and page faults on fresh memory then cost about a third of the time
(at up to 1.8 times the memory). Under torchrun, and with one process, nothing is started.
"""

import logging
import os
import secrets
import signal
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gsplit.errors import CommError, Terminated, explain

__all__ = ["ALLOCATOR", "is_rank", "launch"]

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}


def is_rank() -> bool:
    """Whether a launcher has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(command: Sequence[str], nproc: int) -> None:
    """Run a command as ``nproc`` ranks of this host and wait; if one fails, the others are ended."""
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
    except SignalException as stopped:
        raise (KeyboardInterrupt if stopped.sigval == signal.SIGINT else Terminated) from stopped
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        end = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        fix = "see what the ranks printed above"
        raise CommError(explain(f"rank {rank}", "to finish", end, fix)) from error
