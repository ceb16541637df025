"""What the shuffle is measured against: the same rows over the bare engine, on buffers that exist already.

- ``bare``: ``all_to_all_single`` there and back, nothing else.
- ``composed``: gather by ``index_select``, ``all_to_all_single``, and on the way back ``index_add_``: the least
that any shuffle has to do. It neither makes the mixed tensor nor keeps the incoming gradient intact.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.kernels.buffers import BufferPool
from gsplit.route import Route
from gsplit.shuffle import exchange_rows
from gsplit.telemetry import StepTelemetry

__all__ = ["time_shuffles"]


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
