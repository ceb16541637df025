"""Your own model with a residual, two kinds of layers and dropout, trained and then checked against one process.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000 --features 32
python examples/own_model.py demo.gsplit
torchrun --nproc-per-node 2 examples/own_model.py demo.gsplit      # the same losses
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, SAGEConv

import gsplit


class Model(torch.nn.Module):
    """A layer returns the rows of its destinations, a prefix of its input rows: residuals are x[: h.size(0)] + h."""

    def __init__(self, num_features: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(num_features, width)
        self.near = SAGEConv(width, width)
        self.attend = GATConv(width, width // 4, heads=4, dropout=0.2)
        self.last = SAGEConv(width, num_classes)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.encode(x)
        h = self.near(x, edge_index)
        x = x[: h.size(0)] + F.dropout(h.relu(), 0.3, self.training)
        h = self.attend(x, edge_index)
        x = x[: h.size(0)] + F.elu(h)
        out: Tensor = self.last(x, edge_index)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512, help="of the global mini-batch")
    options = parser.parse_args()

    mesh = gsplit.init()
    store = gsplit.open(options.store)
    torch.manual_seed(0)
    model = gsplit.parallelize(Model(store.num_features, 64, store.num_classes), mesh)
    loader = gsplit.NeighborLoader(store, [10, 5, 5], "train", batch_size=options.batch_size, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = gsplit.Trainer(model, optimizer, loader, max_grad_norm=1.0)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        scores = trainer.evaluate(store, ["val"])
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {losses[-1]:.6f} val {scores['val']:.4f}", flush=True)
    found = gsplit.verify(model, store, [10, 5, 5], "train", batch_size=options.batch_size, mesh=mesh, steps=2)
    if mesh.rank == 0:
        print(f"against one process: gradients differ by at most {found.max_grad_error:.1e}", flush=True)


if __name__ == "__main__":
    main()
