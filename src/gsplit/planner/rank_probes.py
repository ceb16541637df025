"""What ranks do per second together: the program of the ranks that a calibration starts.

``python -m gsplit.planner.rank_probes FOLDER SCALE KERNELS``: every rank writes its figures to a file of its own.
Kernels are measured on all ranks at once, because that is how they will run.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.route import Route
from gsplit.minibatch.shuffle import exchange_stored
from gsplit.planner.probes import KernelRates, measure_kernels, measure_thread_gain
from gsplit.telemetry import StepTelemetry

__all__ = ["CommRates", "measure_comm"]

_WIDTH = 256


@dataclass(frozen=True, slots=True)
class CommRates:
    """Exchanges between so many ranks; names are those of ``Hardware``."""

    latency_s: float
    exchange_bytes_per_s: float
    reduce_bytes_per_s: float


def measure_comm(mesh: Mesh, num_rows: int, repeats: int = 9) -> CommRates:
    """Collectives, small and large. A collective."""
    empty = _exchange(mesh, 0)
    full = _exchange(mesh, num_rows)
    gradient = torch.zeros(1 << 18)

    def reduce() -> None:
        mesh.gradients.all_reduce(Call("probe"), gradient).wait()  # all ranks: the same number of repeats

    latency = _clock(empty, 3 * repeats, time.process_time)  # on a host it is work: system calls, Python
    moved = max(1, num_rows) * _WIDTH * 4
    exchanged = _clock(full, repeats, time.process_time)
    reduced = max(_clock(reduce, repeats, time.process_time) - latency, 1e-6)
    twice = 2 * (mesh.size - 1) / mesh.size * gradient.nbytes
    return CommRates(latency, moved / exchanged, twice / reduced)


def _exchange(mesh: Mesh, num_rows: int) -> Callable[[], None]:
    """Every rank sends ``num_rows`` rows, to its peers in turn."""
    peers = [peer for peer in range(mesh.size) if peer != mesh.rank]
    counts = [0] * mesh.size
    for place, peer in enumerate(peers):
        counts[peer] = num_rows // len(peers) + (1 if place < num_rows % len(peers) else 0)
    received = mesh.shuffles.all_to_all_counts(Call("probe counts"), tuple(counts))
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(mesh.rank))
    route = Route(rows, tuple(counts), received, num_rows, num_rows)
    pool = BufferPool(mesh.device)
    mixed, telemetry = torch.randn(route.num_mixed, _WIDTH), StepTelemetry()

    def run() -> None:
        exchange_stored(
            mixed, route, mesh.shuffles, Call("probe"), pool, telemetry
        )  # all ranks: the same number of repeats

    return run


def _clock(run: Callable[[], None], repeats: int, clock: Callable[[], float]) -> float:
    """Median seconds by a clock; the first runs warm up."""
    found = []
    for repeat in range(repeats + 2):
        start = clock()
        run()
        if repeat >= 2:
            found.append(clock() - start)
    return max(median(found), 1e-9)


def _main(folder: Path, scale: float, kernels: bool) -> None:
    mesh = init("cpu")
    rates: KernelRates | None = measure_kernels(scale) if kernels else None
    comm = measure_comm(mesh, max(100, int(20_000 * scale)))
    threads = 0.0
    if kernels and mesh.rank == 0:
        threads = measure_thread_gain(len(os.sched_getaffinity(0)), max(1000, int(40_000 * scale)))
    mesh.world.gather_text(
        Call("probes done", long_wait=True), ""
    )  # all ranks: the others wait while one measures its threads
    found = {"kernels": asdict(rates) if rates else None, "comm": asdict(comm), "thread_gain": threads}
    (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(found))
    mesh.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "yes")
