"""The same training as train_dgl.py with GSplit: PyG's layers, one mini-batch of all ranks, no blocks in the model.

torchrun --nproc-per-node 2 examples/dgl_to_gsplit/train_gsplit.py graph.npz

Replacements: dgl.graph -> a store (or a PyG Data, as here); NeighborSampler and DataLoader -> NeighborLoader, whose
batch_size is that of ALL ranks; blocks -> batch.edge_index, the same for every layer; DistributedDataParallel ->
parallelize; the mean over a rank's targets -> batch.mean, over those of all ranks.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import gsplit


class SAGE(torch.nn.Module):
    """Layers take PyG's edge_index."""

    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(num_features, hidden)
        self.second = SAGEConv(hidden, num_classes)

    def forward(self, x, edge_index):  # type: ignore[no-untyped-def]
        x = self.first(x, edge_index).relu()
        return self.second(x, edge_index)


def main() -> None:
    arrays = np.load(sys.argv[1])
    mesh = gsplit.init()
    edge_index, x, y = (torch.from_numpy(arrays[name]) for name in ("edge_index", "x", "y"))
    graph = Data(x=x, y=y, edge_index=edge_index)  # for a large graph: gsplit import npz, gsplit partition, gsplit.open
    num_classes = int(arrays["y"].max()) + 1
    train_ids = torch.from_numpy(arrays["train_idx"])
    loader = gsplit.NeighborLoader(graph, [10, 10], train_ids, batch_size=512, mesh=mesh)  # of ALL ranks
    torch.manual_seed(0)
    model = gsplit.parallelize(SAGE(x.shape[1], 64, num_classes), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for batch in loader:
            out = model(batch.x, batch.edge_index)
            loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
