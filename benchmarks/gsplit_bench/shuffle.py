"""The shuffle, against the same rows over the bare engine on buffers that exist already.

- ``bare``: ``all_to_all_single`` there and back, nothing else.
- ``composed``: gather by ``index_select``, ``all_to_all_single``, and on the way back ``index_add_``: the least that any
shuffle has to do. It neither makes the mixed tensor nor keeps the incoming gradient intact.
"""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.route import Route
from gsplit.minibatch.shuffle import exchange_rows
from gsplit.progress import Progress, silent
from gsplit.telemetry import StepTelemetry
from gsplit_bench.ranks import run_ranks

__all__ = ["ShuffleReport", "ShuffleRow", "bench_shuffle", "time_shuffles"]


def time_shuffles(mesh: Mesh, num_rows: int, width: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each round trip, the three ways interleaved; the slowest rank's time counts.

    Every rank has ``num_rows`` local rows and sends each of them to one of the others.
    """
    index = _index(mesh, num_rows)
    pool = BufferPool(mesh.device)
    telemetry = StepTelemetry()
    h = torch.randn(num_rows, width, requires_grad=True)
    g_mixed, g_dst = torch.randn(index.num_mixed, width), torch.randn(num_rows // 2, width)
    plain, out, back = h.detach(), torch.empty(num_rows, width), torch.empty(num_rows, width)
    send, grad = torch.empty(num_rows, width), torch.randn(num_rows, width)
    ours_counts, theirs_counts = list(index.send_counts), list(index.recv_counts)

    def bare() -> None:
        dist.all_to_all_single(out, plain, theirs_counts, ours_counts)  # all ranks: the benchmark's own loop
        dist.all_to_all_single(back, out, ours_counts, theirs_counts)

    def composed() -> None:
        torch.index_select(plain, 0, index.send_rows, out=send)
        dist.all_to_all_single(out, send, theirs_counts, ours_counts)
        dist.all_to_all_single(back, out, ours_counts, theirs_counts)
        grad.index_add_(0, index.send_rows, back)

    def ours() -> None:
        mixed, dst = exchange_rows(h, index, mesh.shuffles, Call("bench"), pool, telemetry)
        torch.autograd.grad([mixed, dst], [h], [g_mixed, g_dst])

    ways: dict[str, Any] = {"bare": bare, "composed": composed, "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            taken = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if repeat >= 2:  # the first two warm up
                seconds[name].append(float(taken))
    assert median(seconds["bare"]) > 0
    return seconds


def _index(mesh: Mesh, num_rows: int) -> Route:
    """Every local row goes to one other rank; as many come back."""
    peers = [peer for peer in range(mesh.size) if peer != mesh.rank]
    counts = [0] * mesh.size
    for place, peer in enumerate(peers):
        counts[peer] = num_rows // len(peers) + (1 if place < num_rows % len(peers) else 0)
    theirs = mesh.loading.all_to_all_counts(Call("bench"), tuple(counts))
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(mesh.rank))
    assert sum(theirs) == num_rows
    return Route(rows, tuple(counts), theirs, num_rows, num_rows // 2)


@dataclass(frozen=True)
class ShuffleRow:
    """Rates of one number of ranks and of rows; bytes are those that leave a rank, there and back."""

    ranks: int
    rows: int
    bytes_per_s: float
    composed_bytes_per_s: float
    bare_bytes_per_s: float
    ratio: float
    """Ours over the composition of torch operations."""
    ratio_range: list[float]
    ratio_over_gloo: float
    """The same without shared memory, through the process group alone."""
    ratio_to_bare: float


@dataclass(frozen=True)
class ShuffleReport:
    """One row per number of ranks and of rows."""

    width: int
    repeats: int
    rows: list[ShuffleRow]

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``: all rows, and the last one's rates."""
        last = asdict(self.rows[-1])
        keys = ("bytes_per_s", "composed_bytes_per_s", "bare_bytes_per_s", "ratio")
        return asdict(self) | {key: last[key] for key in keys}


def bench_shuffle(
    *,
    world_sizes: tuple[int, ...] = (2, 4),
    num_rows: tuple[int, ...] = (10_000, 100_000),
    width: int = 256,
    repeats: int = 15,
    progress: Progress = silent,
) -> ShuffleReport:
    """Measure ours, through shared memory as on any one host, against the composition and the bare exchange."""
    cases = [(world_size, count) for world_size in world_sizes for count in num_rows]
    rows = []
    for number, (world_size, count) in enumerate(cases):
        count -= count % (world_size - 1)  # the same for every peer
        run = (time_shuffles, world_size, count, width, repeats)
        seconds = run_ranks(*run, timeout_s=300.0)[0]
        gloo = run_ranks(*run, timeout_s=300.0, shared_memory=False)[0]
        moved = 2 * 4 * count * width
        ratios = [c / o for c, o in zip(seconds["composed"], seconds["ours"], strict=True)]
        rows.append(
            ShuffleRow(
                ranks=world_size,
                rows=count,
                bytes_per_s=moved / median(seconds["ours"]),
                composed_bytes_per_s=moved / median(seconds["composed"]),
                bare_bytes_per_s=moved / median(seconds["bare"]),
                ratio=median(ratios),
                ratio_range=[min(ratios), max(ratios)],
                ratio_over_gloo=median(c / o for c, o in zip(gloo["composed"], gloo["ours"], strict=True)),
                ratio_to_bare=median(b / o for b, o in zip(seconds["bare"], seconds["ours"], strict=True)),
            )
        )
        progress("shuffle", number + 1, len(cases))
    return ShuffleReport(width, repeats, rows)
