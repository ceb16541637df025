"""An unmodified GCN, normalised by the degrees of the whole graph, which a sampled mini-batch does not contain.

Each rank computes them once for its own vertices, with self-loops and stored weights, like PyG's ``gcn_norm``.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
python examples/gcn.py demo.gsplit
torchrun --nproc-per-node 2 examples/gcn.py demo.gsplit              # the same losses
"""

import argparse

import torch
from torch_geometric.nn import GCN

import gsplit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=512, help="of the global mini-batch")
    options = parser.parse_args()

    mesh = gsplit.init()
    graph = gsplit.open(options.store)
    loader = gsplit.NeighborLoader(graph, [10, 10], "train", batch_size=options.batch_size, mesh=mesh)
    torch.manual_seed(0)
    model = gsplit.parallelize(GCN(graph.num_features, 64, 2, graph.num_classes, dropout=0.3), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        scores = trainer.evaluate(graph, ["val"])
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {losses[-1]:.6f} val {scores['val']:.4f}", flush=True)


if __name__ == "__main__":
    main()
