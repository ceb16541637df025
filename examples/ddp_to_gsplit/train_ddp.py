"""PyG's multi-GPU neighbour sampling with DDP: every rank samples, loads and computes its own mini-batches.

torchrun --nproc-per-node 2 examples/ddp_to_gsplit/train_ddp.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from numba_sampler import sampler_if_needed
from planted import planted_graph
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    data = planted_graph()
    train_nodes = data.train_mask.nonzero().squeeze(1)
    train_nodes = train_nodes.tensor_split(world_size)[rank]
    sampler = sampler_if_needed(data, [10, 10])  # None if pyg-lib or torch-sparse is installed
    loader = NeighborLoader(data, [10, 10], train_nodes, batch_size=128, shuffle=True, neighbor_sampler=sampler)
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 64, 2, 8, dropout=0.3)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(5):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
