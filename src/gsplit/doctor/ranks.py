"""Programs of the doctor on new ranks of this host.

A program is a function ``program(mesh, **arguments)`` of a module; its arguments and result are JSON. Ranks are started
by ``distributed.launch``, as those of every command, so a rank that fails is named.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gsplit.distributed.comm.mesh import init
from gsplit.distributed.launch.launched_rank import end_with_launcher, fail
from gsplit.distributed.launch.launcher import launch

__all__ = ["RunRanks", "run_ranks"]

_TIMEOUT_S = 200.0


RunRanks = Callable[..., Any]
"""``run_ranks`` here, or a function with its parameters, as for the simulated devices of tests."""


def run_ranks(
    program: Callable[..., Any], nproc: int, device: str, /, *, sanitize: bool = False, **arguments: Any
) -> Any:
    """Run ``program(mesh, **arguments)`` on ``nproc`` ranks; the result of rank 0.

    ``sanitize`` turns on torch's CUDA sanitizer. A rank that fails is a ``GroupFailedError``.
    """
    with TemporaryDirectory(prefix="gsplit-doctor-") as folder:
        result = Path(folder) / "result.json"
        task = json.dumps([program.__module__, program.__name__, device, arguments, str(result)])
        command = [sys.executable, "-P", "-m", "gsplit.doctor.ranks", task]
        variables = {"TORCH_CUDA_SANITIZER": "1"} if sanitize else {}
        launch(command, nproc, variables=variables)
        return json.loads(result.read_text())


def _run(task: str) -> int:
    end_with_launcher()
    module, name, device, arguments, result = json.loads(task)
    try:
        mesh = init(device, timeout_s=_TIMEOUT_S)
        found = getattr(importlib.import_module(module), name)(mesh, **arguments)
        if mesh.rank == 0:
            Path(result).write_text(json.dumps(found))
        mesh.close()
    except Exception as error:
        fail(error, 1)
    return 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1]))
