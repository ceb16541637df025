"""Running a solver in a process of its own, so that a crash or a lack of memory is an error and not the caller's end.

The weighted graph lies in a folder, written by ``weights.weigh``; the process opens it, solves, and writes the parts
into the same folder. The memory that a solver will take is estimated first and compared with what is free.
"""

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from gsplit.errors import GSplitError, InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.partitioning.weighted_graph import WeightedGraph, open_weighted

__all__ = ["SOLVERS", "Solution", "Solver", "anonymous_bytes", "estimate_memory", "run_solver", "solver_module"]

SOLVERS = {
    "metis": "metis",
    "kaminpar": "kaminpar",
    "mtkahypar": "mt_kahypar",
    "cluster": "cluster",
    "restream": "restream",
    "random": "random_parts",
}
_PARTS = "parts.npy"
_ERRORS = "errors.txt"
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXPLAINED = 3  # exit code of a solver whose standard error is the whole message


@dataclass(frozen=True)
class Solution:
    """The part of every vertex, whether parts are in bisection order, and what finding them took."""

    solver: str
    parts: npt.NDArray[np.int32]
    ordered: bool
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    estimated_bytes: int


class Solver(Protocol):
    """The interface of a solver's module."""

    ORDERED: bool
    """Whether neighbouring numbers are close parts."""
    THREADED: bool
    """Whether it can use several threads."""

    def check(self, num_constraints: int) -> None:
        """Refuse, before anything long begins, what it cannot do here."""

    def estimate_bytes(self, num_vertices: int, num_entries: int, num_constraints: int) -> int:
        """Anonymous memory it will take."""

    def solve(
        self, graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1
    ) -> npt.NDArray[np.int32]:
        """The part of every vertex. ``threads``: 1, unless it is ``THREADED``."""


def solver_module(solver: str) -> Solver:
    """The module of a solver by name, loaded."""
    if solver not in SOLVERS:
        raise InputError(explain("solver", f"one of {', '.join(SOLVERS)}", solver, "choose one of these"))
    return cast(Solver, import_module(f"gsplit.partitioning.solvers.{SOLVERS[solver]}"))


def run_solver(
    solver: str, graph: WeightedGraph, folder: Path, parts: int, tolerance: float, seed: int, threads: int = 1
) -> Solution:
    """Solve the problem that lies in ``folder``; ``graph`` is the same, opened."""
    module = solver_module(solver)
    estimate = estimate_memory(solver, graph)
    free = free_bytes()
    if estimate > free:
        got = f"{free / 1e9:.1f} GB free"
        smaller = {"kaminpar": "cluster", "cluster": "restream"}.get(solver, "kaminpar or cluster")
        fix = f"use --solver {smaller}, which needs less, or a larger machine"
        raise InputError(explain(solver, f"about {estimate / 1e9:.1f} GB of memory", got, fix))
    started, started_cpu = time.perf_counter(), _cpu_seconds_of_children()
    arguments = [solver, str(folder), str(parts), str(tolerance), str(seed), str(threads)]
    code, peak = _run_watched(arguments, folder / _ERRORS)
    if code != 0:
        raise InputError(_explain_failure(solver, code, (folder / _ERRORS).read_text(errors="replace"), estimate))
    result = np.load(folder / _PARTS, allow_pickle=False)
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds_of_children() - started_cpu
    return Solution(solver, result, bool(module.ORDERED), seconds, cpu_seconds, peak, estimate)


def estimate_memory(solver: str, graph: WeightedGraph) -> int:
    """Bytes of anonymous memory that a solver will take for a graph."""
    module = solver_module(solver)
    return int(module.estimate_bytes(graph.num_vertices, graph.adjncy.size, graph.vertex_weights.shape[1]))


def _cpu_seconds_of_children() -> float:
    """Of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_watched(arguments: list[str], errors: Path) -> tuple[int, int]:
    """Run a solver; its exit code and the most anonymous memory that it was seen to hold."""
    command = [sys.executable, "-P", "-m", "gsplit.partitioning.solvers.run", *arguments]
    peak = 0
    with errors.open("wb") as stream:
        environment = os.environ | {"TMPDIR": str(errors.parent.resolve())}  # what it leaves goes with the folder
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, env=environment)
        try:
            while process.poll() is None:
                peak = max(peak, anonymous_bytes(process.pid))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            process.kill()
            process.wait()
    return process.returncode, peak


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own: not mapped files, which the system can take back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _explain_failure(solver: str, code: int, stderr: str, estimate: int) -> str:
    """The message for a solver that failed."""
    if code == _EXPLAINED:
        return stderr.strip()
    last = (_COLOURS.sub("", stderr).strip().splitlines() or ["no output"])[-1]
    got = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {last}"
    fix = "use another solver"
    if code == -signal.SIGKILL:
        fix = f"it may have run out of memory (about {estimate / 1e9:.1f} GB were expected): use --solver cluster"
    return explain(solver, "a partition", got, fix)


def _main(solver: str, folder: str, parts: str, tolerance: str, seed: str, threads: str) -> None:
    """The solver's own process; it ends when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    graph = open_weighted(Path(folder))
    try:
        result = solver_module(solver).solve(graph, int(parts), float(tolerance), int(seed), int(threads))
    except GSplitError as error:
        sys.stderr.write(str(error))
        sys.exit(_EXPLAINED)
    np.save(Path(folder) / _PARTS, result)


if __name__ == "__main__":
    _main(*sys.argv[1:])
