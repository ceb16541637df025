"""What ranks run in the tests of feature tiers."""

from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh

Found = tuple[list[float], list[float], int, int]


def train_with(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[Found]:
    """Per case of loader options: losses and weights of an epoch in float64, rows loaded and hits of this rank."""
    graph, out = gsplit.open(path), []
    for options in cases:
        names = options.get("features", ["x"])
        width = sum(graph.stored_array(f"features/{name}").shape[1] for name in names)
        loader = gsplit.NeighborLoader(graph, [4, 4], "train", batch_size=200, mesh=mesh, seed=5, **options)
        torch.manual_seed(0)
        model = gsplit.parallelize(GraphSAGE(width, 16, 2, graph.num_classes, dropout=0.3).double(), mesh)
        trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
        losses = trainer.train_epoch()
        weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist()
        counts = [record.counts for record in loader.telemetry.records]
        out.append((losses, weights, sum(c["rows_loaded"] for c in counts), sum(c["cache_hits"] for c in counts)))
        scores = trainer.evaluate(graph, ["test"])  # several features go through to inference
        out[-1][0].append(scores["test"])
    return out
