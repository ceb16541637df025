"""Unsupervised GraphSAGE: embeddings from the edges alone, then a linear classifier of the labels on top of them.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
torchrun --nproc-per-node 2 examples/unsupervised_sage.py demo.gsplit

Edges are positive pairs, and random vertices are negatives (Hamilton et al., 2017, equation 1). Labels are not used
until the end: a logistic regression is fitted to the embeddings of the train targets, and to the input features for
comparison. The embeddings do not depend on the number of ranks. docs/link-prediction.md explains the loader.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit


def some_edges(store: gsplit.Store, count: int) -> Tensor:
    """Edges [2, count] by original id. They are sorted first, so the list is the same for every partition."""
    graph = store.graph
    dst = np.repeat(np.arange(store.num_vertices), graph.in_degrees())
    src, dst = store.original_ids()[np.stack([graph.indices, dst])]
    order = np.lexsort((src, dst))[np.random.default_rng(0).permutation(src.size)[:count]]
    return torch.from_numpy(np.stack([src[order], dst[order]]))


def accuracy_on(x: Tensor, store: gsplit.Store) -> float:
    """Test accuracy of a logistic regression on rows by original id."""
    original = store.original_ids()
    y = torch.empty(store.num_vertices, dtype=torch.int64)
    y[torch.from_numpy(original)] = torch.from_numpy(np.array(store.stored_array("y"), np.int64))
    train, test = (torch.from_numpy(original[store.stored_array(f"targets/{name}")]) for name in ("train", "test"))
    x = (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-6)
    torch.manual_seed(0)
    linear = torch.nn.Linear(x.size(1), store.num_classes)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.05, weight_decay=1e-4)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(linear(x[train]), y[train]).backward()
        optimizer.step()
    return float((linear(x[test]).argmax(1) == y[test]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--out", default="embeddings.npy")
    options = parser.parse_args()
    mesh, store = gsplit.init(), gsplit.open(options.store)
    loader = gsplit.LinkNeighborLoader(
        store,
        [10, 10],
        some_edges(store, options.pairs),
        neg_sampling={"mode": "triplet", "amount": 5},
        batch_size=options.batch_size,
        mesh=mesh,
    )
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(store.num_features, 64, num_layers=2, out_channels=64), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")
    embeddings = torch.from_numpy(np.array(gsplit.infer(model, store, options.out)))  # all ranks write their rows
    if mesh.rank == 0:
        x = torch.empty(store.num_vertices, store.num_features)
        x[torch.from_numpy(store.original_ids())] = torch.from_numpy(np.array(store.stored_array("features/x"))).float()
        print(f"test accuracy: features {accuracy_on(x, store):.3f}, embeddings {accuracy_on(embeddings, store):.3f}")


if __name__ == "__main__":
    main()
