"""A three-layer GraphSAGE written against ``batch.shuffle``; runs on one process or under torchrun.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000 --features 32
python examples/by_hand.py demo.gsplit
torchrun --nproc-per-node 2 examples/by_hand.py demo.gsplit      # the same losses
"""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv

import gsplit
from gsplit.distributed.comm.comm import Call
from gsplit.minibatch.batch import Batch


class Model(torch.nn.Module):
    """Each layer gets (source rows, destination rows) of its block."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        widths = [num_features, 64, 64, num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, batch: Batch) -> Tensor:
        h: Tensor = batch.x
        for layer, conv in enumerate(self.convs):
            h_mixed, h_dst = batch.shuffle(layer, h)
            h = conv((h_mixed, h_dst), batch.blocks[layer].edge_index())
            if layer + 1 < len(self.convs):
                h = h.relu()
        return h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=512, help="of the global mini-batch")
    options = parser.parse_args()

    mesh = gsplit.init()
    store = gsplit.open(options.store)
    torch.manual_seed(0)  # the same weights on every rank
    model = Model(store.num_features, store.num_classes).to(mesh.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = gsplit.NeighborLoader(store, [10, 10, 10], "train", batch_size=options.batch_size, mesh=mesh, seed=0)
    for epoch in range(options.epochs):
        for step, batch in enumerate(loader):
            loss = batch.mean(F.cross_entropy(model(batch), batch.y, reduction="none"))
            loss.backward()
            for parameter in model.parameters():  # average over the ranks
                assert parameter.grad is not None
                mesh.gradients.all_reduce(Call("gradient", step), parameter.grad).wait()
                parameter.grad /= mesh.size
            optimizer.step()
            optimizer.zero_grad()
            if mesh.rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step:3d} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
