"""What ranks do wrong, on purpose, and what each of them is told; run by ``run_ranks``, many cases in one start.

Every case has a mesh of its own, because a collective that one rank never joins stays under way in the old one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init
from gsplit.distributed.watch.stragglers import WaitClock
from gsplit.errors import GSplitError
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize

__all__ = ["HANGS", "LATE", "MISMATCHES", "hang", "mismatch"]

TIMEOUT_S = 2.0  # of the cases in which it runs out
LATE = "eval, batch norm"  # its ranks wait for each other until it is late
Case = Callable[[Mesh], object]


def _told(cases: dict[str, Case], mesh: Mesh, names: list[str], shared_memory: bool) -> dict[str, str]:
    """What this rank is told in every case."""
    told = {}
    for name in names:
        timeout_s = TIMEOUT_S if cases is HANGS else 10.0 if name == LATE else 200.0
        used = init(mesh.device, timeout_s=timeout_s, shared_memory=shared_memory)
        try:
            told[name] = f"passed: {cases[name](used)}"
        except GSplitError as error:
            told[name] = f"{type(error).__name__}: {error}"
            if mesh.rank == 0 and "stop" in name:
                os.kill(int(told[name].partition("rank 1 (process ")[2].partition(")")[0]), signal.SIGCONT)
    try:
        raise RuntimeError("collectives are under way that nobody will join")
    except RuntimeError:
        mesh.close()  # so that it waits for none of them
    return told


def hang(mesh: Mesh, names: list[str], shared_memory: bool) -> dict[str, str]:
    return _told(HANGS, mesh, names, shared_memory)


def mismatch(mesh: Mesh, names: list[str], shared_memory: bool) -> dict[str, str]:
    return _told(MISMATCHES, mesh, names, shared_memory)


# --- a rank that does not come ---------------------------------------------------------------------------------------


def _stay_away(mesh: Mesh) -> None:
    mesh.record_stage("sample of epoch 2, step 9")
    time.sleep(2 * TIMEOUT_S)


def _stop(mesh: Mesh) -> None:
    mesh.record_stage("forward of epoch 2, step 9")
    os.kill(os.getpid(), signal.SIGSTOP)


def _counts(mesh: Mesh) -> object:
    return mesh.shuffles.all_to_all_counts(Call("count ids", 9, 1), (1,) * mesh.size)


def _sum(mesh: Mesh) -> object:
    total = torch.ones(3, device=mesh.device)
    mesh.world.all_reduce(Call("mean", 9), total).wait()
    return total.tolist()


def _without_rank_one(instead: Case, collective: Case) -> Case:
    def run(mesh: Mesh) -> object:
        collective(mesh)  # all are there
        return instead(mesh) if mesh.rank == 1 else collective(mesh)

    return run


def _chain(mesh: Mesh) -> object:
    """Rank 0 waits for rank 2 in one group, rank 2 for rank 1 in another, rank 1 computes."""
    if mesh.rank == 1:
        _stay_away(mesh)
        return None
    return _sum(mesh) if mesh.rank else _counts(mesh)


def _long_wait(mesh: Mesh) -> object:
    """Rank 0 may take its time where the others know that it works alone."""
    if mesh.rank == 0:
        time.sleep(1.5 * TIMEOUT_S)
    return mesh.world.gather_text(Call("finish run", long_wait=True), str(mesh.rank))


def _straggle(mesh: Mesh) -> object:
    """Rank 1 comes late to every collective."""
    clock = WaitClock(mesh)
    for _ in range(10):
        time.sleep(0.1 * (mesh.rank == 1))
        _sum(mesh)
    return clock.name_straggler()


HANGS: dict[str, Case] = {
    "straggler": _straggle,
    "away, counts": _without_rank_one(_stay_away, _counts),
    "away, sum": _without_rank_one(_stay_away, _sum),
    "stopped, counts": _without_rank_one(_stop, _counts),
    "stopped, sum": _without_rank_one(_stop, _sum),
    "chain": _chain,
    "long wait": _long_wait,
}


# --- ranks that do not do the same -----------------------------------------------------------------------------------


def _loader(mesh: Mesh, seed: int = 0) -> NeighborLoader:
    """Without prefetching: loaders then share a group, in which a mismatch is seen at once."""
    drawn = torch.Generator().manual_seed(1)
    edges = torch.randint(0, 60, (2, 300), generator=drawn)
    data = Data(x=torch.randn(60, 4, generator=drawn), edge_index=edges, y=torch.arange(60) % 3)
    return NeighborLoader(data, [3, 3], batch_size=12, mesh=mesh, seed=seed, prefetch=0)


def _model(mesh: Mesh, norm: str | None = None) -> Module:
    torch.manual_seed(0)
    model: Module = parallelize(GraphSAGE(4, 8, 2, 3, dropout=0.5, norm=norm), mesh)
    return model


def _train(mesh: Mesh, model: Module, loader: NeighborLoader, reduce: str = "mean") -> float:
    loss = torch.zeros(())
    for batch in loader:
        rows = F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none")
        loss = batch.mean(rows) if reduce == "mean" else batch.sum(rows)
        loss.backward()
    return float(loss.detach())


def _is_odd(mesh: Mesh) -> bool:
    return mesh.rank == mesh.size - 1


def _mean_against_sum(mesh: Mesh) -> object:
    return _train(mesh, _model(mesh), _loader(mesh), "sum" if _is_odd(mesh) else "mean")


def _frozen(mesh: Mesh) -> object:
    model = _model(mesh)
    if _is_odd(mesh):
        next(model.parameters()).requires_grad_(False)
    return _train(mesh, model, _loader(mesh))


def _evaluating(norm: str | None) -> Case:
    def run(mesh: Mesh) -> object:
        model = _model(mesh, norm)
        if _is_odd(mesh):
            model.eval()
        return _train(mesh, model, _loader(mesh))

    return run


def _other_epoch(mesh: Mesh) -> object:
    loader = _loader(mesh)
    loader.set_epoch(5 if _is_odd(mesh) else 4)
    return _train(mesh, _model(mesh), loader)


def _other_loader(mesh: Mesh) -> object:
    """Two loaders alike, which the ranks take batches from in another order."""
    one, two, model = _loader(mesh), _loader(mesh), _model(mesh)
    return _train(mesh, model, two if _is_odd(mesh) else one)


def _other_weights(mesh: Mesh) -> object:
    """Weights that are changed on one rank after ``parallelize``."""
    model = _model(mesh)
    if _is_odd(mesh):
        torch.nn.init.ones_(next(model.parameters()))
    return _train(mesh, model, _loader(mesh))


def _other_learning_rate(mesh: Mesh) -> object:
    model = _model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3 if _is_odd(mesh) else 1e-3)
    for epoch in range(5):  # of 5 steps
        loader = _loader(mesh)
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none")).backward()
            optimizer.step()
    return None


def _other_order(mesh: Mesh) -> object:
    one, two = torch.ones(3, device=mesh.device), torch.ones(5, device=mesh.device)
    for tensor in (two, one) if _is_odd(mesh) else (one, two):
        mesh.world.all_reduce(Call("count"), tensor).wait()
    return one.tolist()


def _other_kind(mesh: Mesh) -> object:
    tensor = torch.ones(3, device=mesh.device)
    if _is_odd(mesh):
        mesh.world.broadcast(Call("count"), tensor)
    else:
        mesh.world.all_reduce(Call("count"), tensor).wait()
    return tensor.tolist()


def _two_threads(mesh: Mesh) -> object:
    """Each thread has a model and a loader of its own, and both use one mesh."""
    work = [(_model(mesh), _loader(mesh, seed=seed)) for seed in range(2)]
    told: list[str] = []

    def train(model: Module, loader: NeighborLoader) -> None:
        try:
            for _ in range(20):
                _train(mesh, model, loader)
        except GSplitError as error:
            told.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=train, args=one, name=f"trainer {n}") for n, one in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " | ".join(told)


MISMATCHES: dict[str, Case] = {
    "mean against sum": _mean_against_sum,
    "frozen": _frozen,
    "eval": _evaluating(None),
    LATE: _evaluating("batch_norm"),
    "epoch": _other_epoch,
    "loader": _other_loader,
    "weights": _other_weights,
    "learning rate": _other_learning_rate,
    "order": _other_order,
    "kind": _other_kind,
    "two threads": _two_threads,
}
