"""Real ranks on one machine: processes joined by gloo on the loopback address, through a file in a private folder.

The first rank that fails ends the others, and its traceback is what the caller sees. A rank that is killed, and a rank
that never returns, are failures too.

Ranks are forked from a server process that has imported torch and PyG and has done nothing else: it has no threads, no
process group and no state of the caller. The imports take 5 to 8 s of a core; spawned ranks would each pay for them.
``device="sim"`` gives every rank a simulated device of its own.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from gsplit.distributed.comm.mesh import init
from gsplit.distributed.launch.launched_rank import STORE
from gsplit.distributed.watch import processes
from gsplit.errors import CommError, RankFaultError

__all__ = ["IMPORTED_BEFORE", "RankFailedError", "fork_context", "run_ranks"]


_GRACE_S = 0.5
IMPORTED_BEFORE = ["torch_geometric.nn", "gsplit.nn.parallelize", "gsplit.loading.loader"]
"""What the server imports; a rank imports the rest by itself."""


class RankFailedError(AssertionError):
    """A rank raised, was killed or did not finish; the message holds its traceback."""


def _run(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    options: dict[str, Any],
    host: int | None,
    pipe: Connection,
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if host is not None:
        processes.describe_host = lambda: f"host {host}"
    stack = ExitStack()  # the device stays on until the process ends
    try:
        if options["device"].startswith("sim"):
            from gsplit_bench.simulated import simulated_device

            stack.enter_context(simulated_device())  # before the first backward of the process
        mesh = init(timeout_s=300.0, **options)
        result = program(mesh, *args)
    except BaseException as error:
        pipe.send(
            (False, (isinstance(error, CommError) and not isinstance(error, RankFaultError), traceback.format_exc()))
        )
        os._exit(1)  # peers wait in a collective, and a clean exit would block in it
    pipe.send_bytes(pickle.dumps((True, result)))  # send would pass tensors as files that are gone with this process
    pipe.close()
    mesh.close()


def fork_context() -> ForkServerContext:
    """Starts processes as forks of a server, which this makes sure is running, with ``IMPORTED_BEFORE`` imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}  # Python 3.11 does not hand the path on
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def run_ranks(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 500.0,
    replicas: int = 1,
    shared_memory: bool = True,
    device: str = "cpu",
    sample_device: str | None = None,
    hosts: Sequence[int] = (),
) -> list[Any]:
    """Run ``program(mesh, *args)`` on every rank; the results in rank order.

    ``program`` is a function of a module that can be imported. Its result and arguments are sent between processes.
    ``hosts``: how many ranks believe to be on each of several hosts.
    """
    context = fork_context()
    options = {
        "device": device,
        "sample_device": sample_device,
        "replicas": replicas,
        "shared_memory": shared_memory,
    }
    folder = tempfile.TemporaryDirectory(prefix="gsplit-ranks-")
    own = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), STORE: f"{folder.name}/store"}
    shared = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | own  # the server has the environment of its own start
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            host = sum(rank >= stop for stop in accumulate(hosts)) if hosts else None
            process: BaseProcess = context.Process(
                target=_run, args=(program, args, environment, options, host, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(processes, pipes, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        folder.cleanup()


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[bool, str]] = []
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(missing.values())} did not finish in {timeout_s:.0f} s")
        for rank in sorted(missing[pipe] for pipe in pipes if pipe in ready):
            _receive(rank, processes[rank], pipes[rank], results, failures)
        if failures:  # a collective that fails is what another rank's end looks like: wait a little for the cause
            time.sleep(_GRACE_S)
            for rank, pipe in enumerate(pipes):
                if rank not in results and pipe not in ready and pipe.poll():
                    _receive(rank, processes[rank], pipe, results, failures)
            raise RankFailedError(min(failures, key=lambda failure: failure[0])[1])
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [results[rank] for rank in range(len(pipes))]


def _receive(
    rank: int, process: BaseProcess, pipe: Connection, results: dict[int, Any], failures: list[tuple[bool, str]]
) -> None:
    """One rank's result, or how it failed and whether that is only the consequence of another's end."""
    try:
        fine, value = pipe.recv()
    except EOFError:
        process.join()
        failures.append((False, f"rank {rank} ended without a word, exit code {process.exitcode}"))
        return
    if fine:
        results[rank] = value
    else:
        consequence, text = value
        failures.append((consequence, f"rank {rank} failed:\n{text}"))
