"""Running a solver in a process of its own: a crash or a lack of memory is an error message, not the caller's end.

The weighted graph lies in a folder (``weights``); the process opens it, solves, and leaves the parts and what it used
beside it. How much memory a solver will take is estimated first and compared with what the machine has left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.partition.weights import WeightedGraph, open_weighted

__all__ = ["SOLVERS", "Solution", "run_solver"]

SOLVERS = {"metis": "metis", "mtkahypar": "mt_kahypar", "restream": "restream", "random": "random_parts"}
_PARTS, _REPORT = "parts.npy", "report.json"


@dataclass(frozen=True)
class Solution:
    """The part of every vertex, whether parts are in bisection order, and what finding them took."""

    parts: npt.NDArray[np.int32]
    ordered: bool
    seconds: float
    peak_bytes: int
    estimated_bytes: int


def _module(solver: str) -> Any:
    if solver not in SOLVERS:
        raise InputError(explain("solver", f"one of {', '.join(SOLVERS)}", solver, "choose one of these"))
    return import_module(f"gsplit.partition.solvers.{SOLVERS[solver]}")


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def run_solver(solver: str, graph: WeightedGraph, folder: Path, parts: int, tolerance: float, seed: int) -> Solution:
    """Solve the problem that lies in ``folder``; ``graph`` is the same, opened."""
    module = _module(solver)
    if parts < 1 or parts > max(1, graph.num_vertices):
        expected = f"1 to {graph.num_vertices}, the number of vertices"
        raise InputError(explain("parts", expected, parts, "choose fewer parts"))
    if not tolerance > 1.0:
        raise InputError(explain("tolerance", "more than 1, such as 1.05", tolerance, "choose a larger one"))
    estimate = int(module.estimate_bytes(graph.num_vertices, graph.adjncy.size, graph.vertex_weights.shape[1]))
    if estimate > _free_bytes():
        got = f"{_free_bytes() / 1e9:.1f} GB free"
        fix = "use --solver restream, which needs memory for the vertices only, or a larger machine"
        raise InputError(explain(solver, f"about {estimate / 1e9:.1f} GB of memory", got, fix))
    arguments = [solver, str(folder), str(parts), str(tolerance), str(seed)]
    started = time.perf_counter()
    command = [sys.executable, "-P", "-m", "gsplit.partition.solvers.run", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False)
    if done.returncode != 0:
        raise InputError(_why(solver, done.returncode, done.stderr, estimate))
    report = json.loads((folder / _REPORT).read_text())
    result = np.load(folder / _PARTS, allow_pickle=False)
    seconds = time.perf_counter() - started
    return Solution(result, bool(module.ORDERED), seconds, int(report["peak_bytes"]), estimate)


def _why(solver: str, code: int, stderr: str, estimate: int) -> str:
    """What to say about a solver that has ended."""
    last = (stderr.strip().splitlines() or ["nothing"])[-1]
    got = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {last}"
    fix = "use another solver"
    if code == -signal.SIGKILL:
        fix = f"it may have run out of memory (about {estimate / 1e9:.1f} GB were expected): use --solver restream"
    return explain(solver, "a partition", got, fix)


def _main(solver: str, folder: str, parts: str, tolerance: str, seed: str) -> None:
    """The solver's own process."""
    graph = open_weighted(Path(folder))
    result = _module(solver).solve(graph, int(parts), float(tolerance), int(seed))
    np.save(Path(folder) / _PARTS, result)
    status = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    (Path(folder) / _REPORT).write_text(json.dumps({"peak_bytes": peak}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
