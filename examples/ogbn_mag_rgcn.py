"""RGCN on a graph like ogbn-mag: papers have features; authors, institutions and fields have trainable rows.

A rank holds the rows of the vertices that it owns (gsplit.OwnedEmbedding); the losses are the same on any number of
ranks. Papers of a topic share authors and fields, and the features of a paper are mostly noise.

python examples/ogbn_mag_rgcn.py                                     # a generated graph
torchrun --nproc-per-node 2 examples/ogbn_mag_rgcn.py                # the same losses
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import RGCNConv

import gsplit

NUM_TOPICS = 8
WIDTH = 32  # of the features of papers, and of trainable rows


def academic_graph(num_papers: int) -> HeteroData:
    """Papers, authors, institutions and fields, with the edge types of ogbn-mag in both directions."""
    random = torch.Generator().manual_seed(0)
    counts = {"paper": num_papers, "author": num_papers, "institution": num_papers // 50, "field": num_papers // 10}
    topics = {name: torch.randint(NUM_TOPICS, (count,), generator=random) for name, count in counts.items()}
    relations = {("paper", "cites", "paper"): 4, ("author", "writes", "paper"): 4, ("author", "at", "institution"): 1}
    relations[("paper", "about", "field")] = 5
    data = HeteroData()
    for name, count in counts.items():
        data[name].num_nodes = count
    data["paper"].x = 2 * F.one_hot(topics["paper"], WIDTH) + 2 * torch.randn(num_papers, WIDTH, generator=random)
    data["paper"].y = topics["paper"]
    data["paper"].train_mask = torch.rand(num_papers, generator=random) < 0.5
    data["paper"].test_mask = ~data["paper"].train_mask
    for (src, name, dst), per_vertex in relations.items():
        ends = [torch.randint(counts[end], (8 * per_vertex * counts[src],), generator=random) for end in (src, dst)]
        same = topics[src][ends[0]] == topics[dst][ends[1]]
        kept = same | (torch.rand(same.numel(), generator=random) < 0.02)  # most edges are inside a topic
        data[src, name, dst].edge_index = torch.stack(ends)[:, kept]
        data[dst, f"rev_{name}", src].edge_index = data[src, name, dst].edge_index.flip(0)
    return data


class RGCN(torch.nn.Module):
    """Two layers, as in PyG's examples."""

    def __init__(self, hidden: int, num_relations: int) -> None:
        super().__init__()
        self.conv1 = RGCNConv(WIDTH, hidden, num_relations)
        self.conv2 = RGCNConv(hidden, NUM_TOPICS, num_relations)

    def forward(self, x: Tensor, edge_index: Any, edge_type: Any) -> Tensor:
        x = F.dropout(self.conv1(x, edge_index, edge_type).relu(), 0.3, self.training)
        return self.conv2(x, edge_index, edge_type)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256, help="of the global mini-batch")
    options = parser.parse_args()

    mesh = gsplit.init()
    data = academic_graph(options.papers)
    loader = gsplit.NeighborLoader(data, [5, 5], ("paper", "train"), batch_size=options.batch_size, mesh=mesh)
    rows_of = {
        name: gsplit.OwnedEmbedding(data, WIDTH, name, mesh=mesh, scale=0.1)
        for name in ("author", "institution", "field")
    }
    torch.manual_seed(0)
    model = RGCN(32, len(data.edge_types))
    model = gsplit.parallelize(model, mesh, graph=data, num_features=dict.fromkeys(data.node_types, WIDTH))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model.parameters(), lr=1e-2)]
    optimizers += [torch.optim.SparseAdam(rows.parameters(), lr=1e-2) for rows in rows_of.values()]

    def run(batch: Any) -> Tensor:
        x = batch.to_homogeneous({**batch.x_dict, **{name: rows(batch) for name, rows in rows_of.items()}})
        out: Tensor = model(x, batch.edge_index, batch.edge_type)
        return out

    for epoch in range(options.epochs):
        for batch in loader:
            loss = batch.mean(F.cross_entropy(run(batch), batch.y, reduction="none"))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {float(loss.detach()):.6f}", flush=True)
    model.eval()
    correct = 0.0
    test = gsplit.NeighborLoader(data, [-1, -1], ("paper", "test"), batch_size=options.batch_size, mesh=mesh)
    with torch.no_grad():
        for batch in test:  # all neighbours
            correct += float(batch.sum((run(batch).argmax(1) == batch.y).float()))
    if mesh.rank == 0:
        print(f"test accuracy {correct / test.num_targets:.4f}", flush=True)


if __name__ == "__main__":
    main()
