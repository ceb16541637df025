"""Ranks of tests and benchmarks: real processes on this machine, with a simulated device where one is asked for."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gsplit.distributed import local_ranks
from gsplit.distributed.local_ranks import IMPORTED_BEFORE, RankFailedError, fork_context
from gsplit.distributed.mesh import Mesh, init

__all__ = ["IMPORTED_BEFORE", "RankFailedError", "fork_context", "run_ranks"]

_open = ExitStack()  # the device stays on until the process ends


def _join_simulated(**options: Any) -> Mesh:
    from gsplit_bench.simulated import simulated_device

    _open.enter_context(simulated_device())  # before the first backward of the process
    return init(**options)


def run_ranks(
    program: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu", **options: Any
) -> list[Any]:
    """``local_ranks.run_ranks``; ``device="sim"`` gives every rank a simulated device of its own."""
    join = _join_simulated if device.startswith("sim") else init
    return local_ranks.run_ranks(program, world_size, *args, device=device, join=join, **options)
