"""GAT with edge features in its attention. They are stored with the graph; each layer gets those of its own edges.

python examples/gat_edge_features.py                                 # a generated graph
torchrun --nproc-per-node 2 examples/gat_edge_features.py            # the same losses
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT

import gsplit

NUM_CLASSES = 5


def graph_with_distances(num_vertices: int, num_edges: int) -> Data:
    """A graph where one edge in five joins vertices of the same class. Only its distance distinguishes it."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(NUM_CLASSES, (num_vertices,), generator=random)
    edges = torch.randint(num_vertices, (2, num_edges), generator=random)
    apart = (y[edges[0]] != y[edges[1]]).float()
    distance = 4 * apart + 0.5 * torch.randn(num_edges, generator=random)
    x = F.one_hot(y, NUM_CLASSES) + torch.randn(num_vertices, NUM_CLASSES, generator=random)
    train_mask = torch.rand(num_vertices, generator=random) < 0.5
    return Data(x=x, y=y, edge_index=edges, edge_attr=distance[:, None], train_mask=train_mask, test_mask=~train_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--blind", action="store_true", help="train without the distances, for comparison")
    options = parser.parse_args()

    mesh = gsplit.init()
    data = graph_with_distances(options.vertices, 12 * options.vertices)
    edge_attr = None if options.blind else "edge_attr"
    loader = gsplit.NeighborLoader(data, [10, 10], data.train_mask, batch_size=256, mesh=mesh, edge_attr=edge_attr)
    torch.manual_seed(0)
    model = GAT(NUM_CLASSES, 32, 2, NUM_CLASSES, heads=4, edge_dim=None if options.blind else 1)
    model = gsplit.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(options.epochs):
        for batch in loader:
            values = {} if options.blind else {"edge_attr": batch.edge_attr}
            out = model(batch.x, batch.edge_index, **values)
            loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {float(loss.detach()):.6f}", flush=True)
    scores = gsplit.evaluate(model, data, ["test"], edge_attr=edge_attr)
    if mesh.rank == 0:
        print(f"test {scores['test']:.4f}", flush=True)


if __name__ == "__main__":
    main()
