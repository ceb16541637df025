"""The same training with GSplit: all ranks share one mini-batch. Lines that differ from train_ddp.py are marked.

torchrun --nproc-per-node 2 examples/ddp_to_gsplit/train_gsplit.py
"""

import os

import torch
import torch.nn.functional as F
from planted import planted_graph
from torch_geometric.nn import GraphSAGE

import gsplit  # (1)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = gsplit.init()  # (2)
    data = planted_graph()
    train_nodes = data.train_mask.nonzero().squeeze(1)
    loader = gsplit.NeighborLoader(data, [10, 10], train_nodes, batch_size=128 * world_size, mesh=mesh)  # (3) GLOBAL
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 64, 2, 8, dropout=0.3)
    model = gsplit.parallelize(model, mesh)  # (4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(5):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = batch.mean(F.cross_entropy(out, batch.y[: batch.batch_size], reduction="none"))  # (5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
