"""Ranks on simulated devices whose Triton kernels run as compiled for sm_80."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import switched_on

__all__ = ["run_compiled_ranks"]


def run_compiled_ranks(program: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """``run_ranks`` on such devices."""
    with patch.dict(os.environ, {"GSPLIT_TRITON": "1"}):
        return run_ranks(partial(_run, program), world_size, *args, device="sim:0", **options)


def _run(program: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
    from ptx.launcher import CompiledLauncher  # imports triton

    switched_on().state.launcher = CompiledLauncher(80, seed=mesh.rank)
    return program(mesh, *args)
