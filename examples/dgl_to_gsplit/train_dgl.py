"""Data-parallel training with DGL and DDP, like DGL's multi-GPU examples; train_gsplit.py is the same with GSplit.

torchrun --nproc-per-node 2 examples/dgl_to_gsplit/train_dgl.py graph.npz       (tested with DGL 1.1.3)

graph.npz contains edge_index, x, y and train_idx, as ``gsplit import npz`` reads them.
"""

import os
import sys

import dgl
import dgl.nn
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class SAGE(torch.nn.Module):
    """Layers take DGL's blocks."""

    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, num_classes, "mean")

    def forward(self, blocks, x):  # type: ignore[no-untyped-def]
        x = self.first(blocks[0], x).relu()
        return self.second(blocks[1], x)


def main() -> None:
    arrays = np.load(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    src, dst = torch.from_numpy(arrays["edge_index"])
    graph = dgl.graph((src, dst), num_nodes=len(arrays["x"]))
    graph.ndata["x"], graph.ndata["y"] = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    num_classes = int(arrays["y"].max()) + 1
    sampler = dgl.dataloading.NeighborSampler([10, 10], prefetch_node_feats=["x"], prefetch_labels=["y"])
    train_ids = torch.from_numpy(arrays["train_idx"])
    loader = dgl.dataloading.DataLoader(
        graph, train_ids, sampler, batch_size=512 // world_size, shuffle=True, use_ddp=world_size > 1
    )  # the batch of ONE rank
    torch.manual_seed(0)
    model = DistributedDataParallel(SAGE(graph.ndata["x"].shape[1], 64, num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for _, _, blocks in loader:
            out = model(blocks, blocks[0].srcdata["x"])
            loss = F.cross_entropy(out, blocks[-1].dstdata["y"])  # the mean over this rank's targets
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("DGLBACKEND", "pytorch")
    main()
