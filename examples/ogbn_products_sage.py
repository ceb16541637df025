"""GraphSAGE on ogbn-products with the settings of PyG's example: 3 layers of 256, fanout 15, 10, 5, batch size 1024.

The batch size is that of the global mini-batch, so the losses are the same on any number of ranks.

gsplit import ogb dataset/ogbn_products products.gsplit --symmetrise           # each undirected edge is listed once
gsplit partition products.gsplit products8.gsplit --parts 8 --fanout 15,10,5
torchrun --nproc-per-node 2 examples/ogbn_products_sage.py products8.gsplit

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000            # without a download
python examples/ogbn_products_sage.py demo.gsplit --epochs 2
"""

import argparse

import torch
from torch_geometric.nn import GraphSAGE

import gsplit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=1024, help="of the global mini-batch")
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()

    mesh = gsplit.init()
    graph = gsplit.open(options.store)
    loader = gsplit.NeighborLoader(graph, [15, 10, 5], "train", batch_size=options.batch_size, mesh=mesh)
    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, options.hidden, 3, graph.num_classes, dropout=0.5)
    model = gsplit.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = gsplit.Trainer(model, optimizer, loader)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        scores = trainer.evaluate(graph, ["val", "test"], keep_best="val")  # exact: all neighbours, not sampled ones
        if mesh.rank == 0:
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch} loss {mean:.6f} val {scores['val']:.4f} test {scores['test']:.4f}", flush=True)


if __name__ == "__main__":
    main()
