"""What ranks run in the tests of foreign copies."""

from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError


def train_with_copies(mesh: Mesh, paths: list[str], budgets: list[int], targets: list[int] | None) -> list[Any]:
    """Losses, weights and counters of two epochs, for every budget; on this rank's own file."""
    graph = gsplit.open(paths[mesh.rank])
    found = []
    for budget in budgets:
        nodes = "train" if targets is None else torch.tensor(targets)
        loader = gsplit.NeighborLoader(graph, [4, 4], nodes, batch_size=128, mesh=mesh, seed=5, copies=budget)
        torch.manual_seed(0)
        model = GraphSAGE(graph.num_features, 16, 2, graph.num_classes, dropout=0.3)
        wrapped = gsplit.parallelize(model, mesh)
        trainer = gsplit.Trainer(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-2), loader)
        losses = trainer.train_epoch() + trainer.train_epoch()
        weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist()
        names = ("rows_received", "rows_sent", "rows_copied", "bytes_received", "collectives")
        counts = {name: sum(r.counts.get(name, 0) for r in loader.telemetry.records) for name in names}
        found.append((losses, weights, counts))
    return found


def copies_on_one_rank_only(mesh: Mesh, path: str) -> str:
    """What is said when ranks are started with different budgets."""
    try:
        gsplit.NeighborLoader(gsplit.open(path), [4], "train", batch_size=8, mesh=mesh, copies=1000 * mesh.rank)
    except InputError as error:
        return str(error)
    return "accepted"
