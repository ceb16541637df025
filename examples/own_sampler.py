"""Your own sampler: popular in-neighbours are sampled more often, on any number of ranks.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
torchrun --nproc-per-node 2 examples/own_sampler.py demo.gsplit

A sampler is a function that returns the sampled in-edges of some vertices. The sample may depend on the vertex and the
key, but not on the rank. Every number of ranks then trains on the same mini-batches, which ``gsplit.verify`` checks
against one process. docs/minibatch.md has the rules.
"""

import argparse

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.extending import DrawnSampler, SampledRange, mix


class PopularSampling:
    """Samples without replacement, weighted by out-degree. The loader calls it with the range of a rank."""

    def __init__(self, store: gsplit.Store) -> None:
        self.popularity = np.bincount(store.graph.indices, minlength=store.num_vertices)

    def __call__(self, part: SampledRange) -> DrawnSampler:
        graph, indptr = part.graph, torch.from_numpy(np.array(part.graph.indptr))

        def draw(ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
            starts, stops = indptr[ids - graph.first_vertex], indptr[ids - graph.first_vertex + 1]
            degrees = stops - starts
            vertex = torch.repeat_interleave(torch.arange(ids.numel()), degrees)  # the destination of every in-edge
            position = torch.arange(vertex.numel()) - (degrees.cumsum(0) - degrees)[vertex]
            edges = starts[vertex] + position
            words = mix(mix(key, part.to_original_ids(ids))[vertex], position)  # keyed random numbers
            uniform = ((words >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)
            weights = torch.from_numpy(self.popularity[graph.indices[edges.numpy()]])
            order = (uniform.log() / weights).argsort(descending=True)  # Efraimidis and Spirakis, 2006
            order = order[vertex[order].argsort(stable=True)]  # grouped by vertex, best first
            counts = degrees if fanout < 0 else degrees.clamp(max=fanout)
            return counts, edges[order[position < counts[vertex]]]

        return DrawnSampler(part, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    mesh, store = gsplit.init(), gsplit.open(options.store)
    sampler = PopularSampling(store)
    loader = gsplit.NeighborLoader(store, [5, 5], "train", batch_size=512, mesh=mesh, sampler=sampler)
    torch.manual_seed(0)
    net = GraphSAGE(store.num_features, 32, num_layers=2, out_channels=store.num_classes)
    check = gsplit.verify(net, store, [5, 5], "train", batch_size=512, mesh=mesh, sampler=sampler)
    model = gsplit.parallelize(net, mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")
    if mesh.rank == 0:
        print(f"{check.ranks} rank(s) equal to one process: {check.ok}")


if __name__ == "__main__":
    main()
