"""What ranks run in the tests of partitioned stores."""

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh


def train_here(mesh: Mesh, paths: list[str], out: str) -> tuple[list[float], list[float], dict[str, float]]:
    """Train two epochs from this rank's own file, in float64; losses, weights and exact scores; outputs into a file."""
    graph = gsplit.open(paths[mesh.rank])
    loader = gsplit.NeighborLoader(graph, [4, 4], "train", batch_size=128, mesh=mesh, seed=5)
    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, 16, 2, graph.num_classes, dropout=0.3).double()
    wrapped = gsplit.parallelize(model, mesh)
    trainer = gsplit.Trainer(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-2), loader)
    losses = trainer.train_epoch() + trainer.train_epoch()
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist()
    gsplit.infer(wrapped, graph, out=out)
    return losses, weights, gsplit.evaluate(wrapped, graph, ["val", "test"])
