"""A recommender as MovieLens has it: users and items without features, and a list of what users liked.

Users and items are vertices of one graph. Each has a trainable row, held by the rank that owns the vertex
(gsplit.OwnedEmbedding). GraphSAGE combines the rows of neighbours. An item that a user liked is to score higher than
the items of all other pairs of the GLOBAL mini-batch, so the losses are the same on any number of ranks.

python examples/recommender.py make likes.gsplit                     # a generated graph
gsplit partition likes.gsplit likes4.gsplit --parts 4 --targets all --fanout 8,8
torchrun --nproc-per-node 2 examples/recommender.py train likes4.gsplit
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gsplit

NUM_GENRES = 6


def make(path: str, num_users: int) -> None:
    """Users like items of their genre, popular ones more often. Users are vertices 0 .. n-1, items follow."""
    random = torch.Generator().manual_seed(0)
    num_items = num_users // 4
    genre = torch.randint(NUM_GENRES, (num_users + num_items,), generator=random)
    users = torch.randint(num_users, (400 * num_users,), generator=random)
    popular = torch.rand(users.numel(), generator=random) ** 2
    items = num_users + (popular * num_items).long()
    liked = (genre[users] == genre[items]) & (torch.rand(users.numel(), generator=random) < 0.25)
    pairs = torch.unique(torch.stack([users, items])[:, liked], dim=1)
    pairs = pairs[:, torch.randperm(pairs.size(1), generator=random)]
    train, test = pairs[:, : pairs.size(1) * 9 // 10], pairs[:, pairs.size(1) * 9 // 10 :]
    negatives = num_users + torch.randint(num_items, (test.size(1), 100), generator=random)
    edges = torch.cat([train, train.flip(0)], dim=1)
    graph = gsplit.from_pyg(Data(edge_index=edges, num_nodes=genre.numel()), path)
    graph = gsplit.add_pairs(graph, "train", train)
    gsplit.add_pairs(graph, "test", test, negatives=negatives)  # items only


def train(path: str, epochs: int, batch_size: int) -> None:
    """Train, and rank the items of the test pairs among 100 others."""
    mesh = gsplit.init()
    graph = gsplit.open(path)
    loader = gsplit.LinkNeighborLoader(
        graph, [8, 8], "train", neg_sampling="in_batch", batch_size=batch_size, features=None, mesh=mesh
    )
    rows = gsplit.OwnedEmbedding(graph, 32, mesh=mesh, scale=0.1)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(32, 32, 2, 32), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    of_rows: torch.optim.Optimizer = torch.optim.SparseAdam(rows.parameters(), lr=1e-2)
    for epoch in range(epochs):
        for batch in loader:
            z = model(rows(batch), batch.edge_index)
            scores = z[batch.src_index] @ z[batch.candidates].T
            loss = batch.mean(F.cross_entropy(scores, batch.own_columns, reduction="none"))
            loss.backward()
            for each in (optimizer, of_rows):
                each.step()
                each.zero_grad()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {float(loss.detach()):.6f}", flush=True)
    found = gsplit.evaluate_links(model, graph, "test", features=rows)  # exact: all neighbours
    if mesh.rank == 0:
        print(f"test mrr {found['mrr']:.4f} hits@10 {found['hits@10']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "train"])
    parser.add_argument("store")
    parser.add_argument("--users", type=int, default=1000, help="make: number of users")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512, help="pairs of the global mini-batch")
    options = parser.parse_args()
    if options.what == "make":
        make(options.store, options.users)
    else:
        train(options.store, options.epochs, options.batch_size)


if __name__ == "__main__":
    main()
