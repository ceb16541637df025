"""What the ranks of the distributed tests run. Functions here are imported by every rank's process."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recorded_calls import record_calls
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm import shared_memory
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.watch import processes
from gsplit.errors import CommError, InputError
from gsplit.graph.ownership import Ownership
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.shuffle import exchange_rows
from gsplit.nn.gradients import GradientAverage, averages_of
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.telemetry import StepTelemetry

POOL = BufferPool(torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """A graph, who owns what, and what to sample."""

    seed: int
    n: int
    src: Any
    dst: Any
    boundaries: tuple[int, ...]
    fanouts: list[int]
    targets: Any
    batch_size: int = 7


def store_of(case: Case, dtype: str = "float64") -> MemoryStore:
    """The case's graph, renumbered at random, with features, labels and targets."""
    rng = np.random.default_rng(case.seed)
    parts = rng.permutation(case.n)
    arrays = {
        "features/x": (rng.normal(size=(case.n, 6)).astype(dtype), dtype),
        "y": (rng.integers(0, 5, case.n), "int64"),
    }
    store = renumbered_store(case.src, case.dst, parts, arrays, {"train": case.targets})
    return MemoryStore(store.graph, [0, case.n], store.arrays, store.dtypes)


def loader_of(mesh: Mesh, case: Case, **options: Any) -> NeighborLoader:
    return NeighborLoader(
        store_of(case),
        case.fanouts,
        "train",
        batch_size=case.batch_size,
        mesh=mesh,
        seed=case.seed,
        ownership=Ownership(case.boundaries) if mesh.size > 1 else None,
        **options,
    )


def sampled_edges(mesh: Mesh, cases: list[Case]) -> list[Any]:
    """Per case, step and layer: this rank's edges in original ids; x of every row it has; and its collectives."""
    out = []
    for case in cases:
        calls = record_calls(mesh.loading)
        loader = loader_of(mesh, case)
        steps = []
        for batch in loader:
            layers = []
            for layer, block in enumerate(batch.blocks):
                ids = batch.n_id.double().unsqueeze(1)
                mixed = batch.mixed_ids(layer).double().unsqueeze(1)
                src, dst = block.edge_index()
                edges = torch.stack([mixed[src, 0], ids[dst, 0]], 1).long()
                layers.append(edges.tolist())
                if layer == 0:
                    features = torch.cat([mixed, batch.x], 1)
            steps.append(
                {
                    "layers": layers,
                    "targets": batch.n_id[: batch.batch_size].tolist(),
                    "rows": features.tolist(),
                    "inputs": batch.n_id.tolist(),
                    "global": batch.global_batch_size,
                }
            )
        out.append({"steps": steps, "len": len(loader), "calls": [str(call) for call in calls]})
    return out


def adjoint(mesh: Mesh, cases: list[Case]) -> list[tuple[float, float]]:
    """<shuffle(h), b> and <h, backward(b)>, summed over the ranks, for every layer of a step; several dtypes."""
    out = []
    for case in cases:
        loader = loader_of(mesh, case)
        batch = loader.make_batch(0, 0)
        for layer in batch.layers:
            route = layer.route
            assert route is not None and route.appends
            for deterministic in (False, True):
                g = torch.Generator().manual_seed(mesh.rank)
                h = torch.randn(route.num_local, 3, generator=g, dtype=torch.float64, requires_grad=True)
                call, telemetry = Call("adjoint"), StepTelemetry()
                mixed, dst = exchange_rows(h, route, mesh.shuffles, call, POOL, telemetry, deterministic=deterministic)
                b = torch.randn(mixed.shape, generator=g, dtype=torch.float64)
                c = torch.randn(dst.shape, generator=g, dtype=torch.float64)
                (grad,) = torch.autograd.grad([mixed, dst], [h], [b, c])
                pair = torch.stack([(mixed * b).sum() + (dst * c).sum(), (h * grad).sum()]).detach()
                mesh.gradients.all_reduce(Call("sum"), pair).wait()
                out.append((float(pair[0]), float(pair[1])))
            for dtype in (torch.float32, torch.bfloat16):
                rows = torch.randn(route.num_local, 2).to(dtype)
                got, _ = exchange_rows(rows, route, mesh.shuffles, Call("dtype"), POOL, StepTelemetry())
                assert got.dtype == dtype and torch.equal(got[: route.num_local], rows)
    return out


class ByHand(torch.nn.Module):
    """Three layers written against ``batch.shuffle``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        widths = [(6, 8), (8, 8), (8, 5)]
        if kind == "sage":
            self.convs = torch.nn.ModuleList([SAGEConv(a, b) for a, b in widths])
        else:
            self.convs = torch.nn.ModuleList([GATConv((a, a), b, heads=2, concat=False) for a, b in widths])

    def forward(self, batch: Any) -> Tensor:
        h: Tensor = batch.x
        for layer, conv in enumerate(self.convs):
            h_mixed, h_dst = batch.shuffle(layer, h)
            h = conv((h_mixed, h_dst), batch.blocks[layer].edge_index())
            if layer < 2:
                h = torch.nn.functional.elu(h)
        return h


def train_by_hand(mesh: Mesh, cases: list[Case]) -> list[Any]:
    """Outputs by original id, loss and averaged gradients of every step, for SAGE and GAT, with a weight penalty."""
    out = []
    for case in cases:
        for kind in ("sage", "gat"):
            torch.manual_seed(0)
            model = ByHand(kind).double()
            loader = loader_of(mesh, case, deterministic=kind == "gat")
            for batch in loader:
                model.zero_grad()
                result = model(batch)
                loss = batch.mean(torch.nn.functional.cross_entropy(result, batch.y, reduction="none"))
                total = loss + 0.01 * sum((p**2).sum() for p in model.parameters())
                total.backward()
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                assert len(grads) == len(list(model.parameters()))
                for grad in grads:
                    mesh.gradients.all_reduce(Call("gradient"), grad).wait()
                rows = dict(zip(batch.n_id[: batch.batch_size].tolist(), result.detach().tolist(), strict=True))
                out.append(
                    {"rows": rows, "loss": float(loss.detach()), "grads": [(g / mesh.size).tolist() for g in grads]}
                )
    return out


def count_exchanges(mesh: Mesh, case: Case) -> dict[str, list[str]]:
    """The collectives of one whole training step, by group."""
    loader = loader_of(mesh, case)
    model = ByHand("sage").double()
    groups = {"loading": mesh.loading, "shuffles": mesh.shuffles, "world": mesh.world}
    calls = {name: record_calls(comm) for name, comm in groups.items()}
    batch = loader.make_batch(0, 0)
    batch.sum(model(batch).sum(dim=1)).backward()
    return {name: [str(call) for call in recorded] for name, recorded in calls.items()}


def disagree(mesh: Mesh) -> str:
    """Ranks with different settings: the error every rank gets."""
    try:
        assert_same_on_all_ranks(
            mesh.loading, "NeighborLoader", {"seed": mesh.rank, "same": 1, "long": list(range(1000))}
        )
    except InputError as error:
        return str(error)
    return "agreed"


def fail_on_one(mesh: Mesh, how: str, clock: str) -> None:
    """Rank 1 notes the time and raises, is killed, or skips a collective, while the others wait for it.

    They wait in a collective of the process group, and where it is killed in one through shared memory.
    """
    if mesh.rank == 1:
        Path(clock).write_text(str(time.monotonic()))
        if how == "raise":
            raise ValueError("rank 1 has a bug")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    if how == "kill":
        mesh.shuffles.all_to_all_counts(Call("wait", 3, 2), (0,) * mesh.size)
    mesh.shuffles.all_reduce(Call("wait", 3, 2), torch.zeros(1)).wait()


class _EndsAfterTheLook:
    """A collective that ends between a look at it, which came too early, and what is asked then."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.is_completed = work.is_completed

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait; a look with a limit is over just before the end."""
        self._work.wait()
        if limit is not None:
            raise RuntimeError("Operation timed out!")


def end_after_a_look(mesh: Mesh) -> float:
    """A sum over ranks that is there when the host has just given up looking."""
    total = torch.ones(1)
    work: Any = mesh.world.all_reduce(Call("sum"), total)
    work._work = _EndsAfterTheLook(work._work)
    work.wait()
    return total.item()


def everything(mesh: Mesh, cases: list[Case]) -> dict[str, Any]:
    """Several programs in one start of the ranks, which is what takes the time."""
    return {
        "edges": sampled_edges(mesh, cases),
        "adjoint": adjoint(mesh, cases),
        "training": train_by_hand(mesh, cases),
        "exchanges": count_exchanges(mesh, cases[0]),
        "disagreement": disagree(mesh),
        "lists": {what: different_lists(mesh, cases[0], what) for what in ("nodes", "parts")},
        "rank": mesh.rank,
        "comm": (type(mesh.shuffles).__name__, mesh.shuffles.levels is not None),
    }


def exchange_many(mesh: Mesh, count: int) -> int:
    """Exchanges whose every element says who sent it, to whom, and when; returns how many arrived as they should."""
    rng = np.random.default_rng(mesh.rank)
    shared = np.random.default_rng(99)
    dtypes = [torch.float64, torch.float32, torch.int64, torch.int32, torch.bfloat16, torch.uint8]
    right = 0
    for turn in range(count):
        dtype = dtypes[turn % len(dtypes)]
        counts = shared.integers(0, 4 ** int(shared.integers(1, 8)), (mesh.size, mesh.size))
        sent = [
            torch.full((int(counts[mesh.rank, p]), 3), (7 * turn + 3 * mesh.rank + p) % 120) for p in range(mesh.size)
        ]
        rows = torch.cat(sent).to(dtype)
        if turn % 2:
            filled = mesh.shuffles.send_buffer(tuple(rows.shape), dtype)
            filled.copy_(rows)
            rows = filled
        out = torch.empty(int(counts[:, mesh.rank].sum()), 3, dtype=dtype)
        theirs, ours = tuple(counts[:, mesh.rank].tolist()), tuple(counts[mesh.rank].tolist())
        if rng.random() < 0.1:
            time.sleep(0.002)
        version = out._version
        mesh.shuffles.all_to_all(Call("many", turn), out, rows, theirs, ours).wait()
        assert out._version > version or out.numel() == 0  # autograd has been told
        pieces = out.split(theirs)
        wanted = [(7 * turn + 3 * p + mesh.rank) % 120 for p in range(mesh.size)]
        right += all(bool((piece == value).all()) for piece, value in zip(pieces, wanted, strict=True))
    return right


def refuse_sharing(mesh: Mesh) -> str:
    """Rank 1 offers a segment that does not exist: all ranks stay with the process group."""
    groups = [comm._group for comm in (mesh.shuffles, mesh.loading)]  # type: ignore[attr-defined]
    if mesh.rank == 1:
        processes.describe_host = lambda: "another host"
    return type(shared_memory.share_memory(groups)[0]).__name__


def mismatched(mesh: Mesh, ways: list[str]) -> dict[str, str]:
    """Ranks that do not do the same: the errors, or what came of it."""
    return {how: _mismatched(mesh, how) for how in ways}


def _mismatched(mesh: Mesh, how: str) -> str:
    dtype = torch.float64 if how == "dtype" and mesh.rank else torch.float32
    width = 4 if how == "width" and mesh.rank else 3
    call = Call("sum" if how == "call" and mesh.rank else "mean", 0)
    count = 1 if how == "count" and mesh.rank else 2
    rows, counts = torch.ones(count, width, dtype=dtype), tuple(count * (p != mesh.rank) for p in range(mesh.size))
    try:
        if how == "kind" and mesh.rank:
            mesh.shuffles.all_to_all_counts(call, counts)
        else:
            mesh.shuffles.all_to_all(call, torch.empty_like(rows), rows, counts, counts).wait()
    except CommError as error:
        return str(error)
    return "passed"


def different_lists(mesh: Mesh, case: Case, what: str) -> str:
    """Ranks with other targets, or another partition: the error every rank gets."""
    seed = torch.Generator().manual_seed(mesh.rank)
    data = Data(x=torch.ones(case.n, 2), edge_index=torch.from_numpy(np.stack([case.src, case.dst])))
    nodes = torch.randperm(case.n, generator=seed if what == "nodes" else None)[:10] if what == "nodes" else None
    parts = torch.arange(case.n) % mesh.size
    if what == "parts":
        parts = parts[torch.randperm(case.n, generator=seed)]
    try:
        NeighborLoader(data, [2], nodes, batch_size=4, mesh=mesh, partition=parts)
    except InputError as error:
        return str(error)
    return "passed"


def average_twice(mesh: Mesh, length: int) -> list[list[float]]:
    """The same gradients at a backward in which weights are compared, and at one in which they are not."""
    parameter = Parameter(torch.ones(length))
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(mesh.rank))
    average = GradientAverage(averages_of(mesh), DeferredChecks())
    average.follow([parameter])
    found: list[list[float]] = []
    for _ in range(2):
        (parameter * gradient).sum().backward()
        assert parameter.grad is not None
        found.append(parameter.grad.tolist())
        parameter.grad = None
    average.detach()
    return found


def average_lengths(mesh: Mesh) -> list[list[list[float]]]:
    """Several, because gloo cuts a tensor into equal pieces, and its order of adding depends on the piece."""
    return [average_twice(mesh, length) for length in range(5000, 5008)]


def return_rank(mesh: Mesh, offset: int) -> int:
    return mesh.rank + offset


def return_tensor(mesh: Mesh) -> dict[str, torch.Tensor]:
    return {"rows": torch.arange(100_000) + mesh.rank}


def read_variable(mesh: Mesh, name: str) -> str | None:
    return os.environ.get(name)


def imported_modules(mesh: Mesh) -> set[str]:
    """What this process has imported."""
    return set(sys.modules)
