"""A layer sampler of one's own: the most popular in-neighbours instead of random ones, split among ranks.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
python examples/own_sampler.py demo.gsplit

It implements ``gsplit.sampling.protocol``: a rank draws the in-edges of the vertices it owns; sources that others own
are named by id, once each, and the exchange gives them rows. What is drawn must depend on the vertex alone (and on the
key, if it is random), not on the rank: then every number of ranks makes the same mini-batch, which is checked at the
end, all ranks in one process. These modules are internal and may move; ``NeighborLoader`` does not take a sampler yet.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import gsplit
from gsplit.graph import Graph
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import SampledLayer
from gsplit.split import Split, split_in_one_process

Ids = npt.NDArray[np.int64]


class PopularSampler:
    """See ``LayerSampler``. ``popularity[v]`` decides between the neighbours of a vertex; the smaller id, if equal."""

    num_bytes = num_range_bytes = 0

    def __init__(self, graph: Graph, popularity: Ids) -> None:
        self.graph, self.popularity = graph, popularity

    def start(self, targets: Tensor) -> "PopularFrontier":
        return PopularFrontier(self, targets)


class PopularFrontier:
    """See ``Frontier``: the rows of one mini-batch on one rank, in the order in which they were found."""

    def __init__(self, sampler: PopularSampler, targets: Tensor) -> None:
        self._sampler, self._row_of = sampler, dict[int, int]()
        self.locate(targets)

    @property
    def num_rows(self) -> int:
        return len(self._row_of)

    def ids(self, num_rows: int) -> Tensor:
        return torch.tensor(list(self._row_of)[:num_rows], dtype=torch.int64)

    def sample_layer(self, key: int, fanout: int) -> SampledLayer:
        """The ``key`` names the randomness of this layer; nothing here is random."""
        graph, indptr, sources, slots = self._sampler.graph, [0], list[int](), dict[int, int]()
        for vertex in list(self._row_of):  # those found so far; sources are appended behind them
            for source in self._most_popular(graph.sources(vertex), fanout):
                if graph.first_vertex <= source < graph.stop_vertex:
                    sources.append(self._row_of.setdefault(source, len(self._row_of)))
                else:
                    sources.append(-1 - slots.setdefault(source, len(slots)))
            indptr.append(len(sources))
        lists: Sequence[list[int]] = (indptr, sources, list(slots))
        return SampledLayer(*(torch.tensor(each, dtype=torch.int64) for each in lists))

    def _most_popular(self, sources: Ids, fanout: int) -> list[int]:
        order = np.lexsort((sources, -self._sampler.popularity[sources]))
        return [int(source) for source in sources[order[: None if fanout < 0 else fanout]]]

    def locate(self, ids: Tensor) -> Tensor:
        rows = [self._row_of.setdefault(vertex, len(self._row_of)) for vertex in ids.tolist()]
        return torch.tensor(rows, dtype=torch.int64)

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        places = torch.where(drawn.sources < 0, -1 - drawn.sources, 0)
        foreign = foreign_rows[places] if foreign_rows.numel() else places
        return torch.where(drawn.sources < 0, foreign, drawn.sources)

    def close(self) -> None:
        self._row_of.clear()


def edges_of(splits: list[Split], layer: int) -> set[tuple[int, int]]:
    """The edges (source, destination) that all ranks together drew in a layer."""
    found = set()
    for split in splits:
        drawn = split.layers[layer]
        block, ids = drawn.block, torch.cat([split.input_ids[: drawn.index.num_local], drawn.foreign_ids])
        for row in range(block.num_dst):
            sources = block.src_rows[block.indptr[row] : block.indptr[row + 1]]
            found |= {(int(source), int(ids[row])) for source in ids[sources]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    store = gsplit.open(options.store)
    graph = store.graph
    popularity = np.bincount(graph.indices, minlength=graph.num_vertices)
    targets = torch.arange(0, graph.num_vertices, max(1, graph.num_vertices // 64))
    made = {}
    for num_ranks in (1, options.ranks):
        boundaries = tuple(graph.num_vertices * rank // num_ranks for rank in range(num_ranks + 1))
        ownership = Ownership(boundaries)
        samplers = [PopularSampler(graph.restrict(*ownership.range_of(rank)), popularity) for rank in range(num_ranks)]
        splits = split_in_one_process(samplers, targets, [5, 5], StepKey(0, 0, 0), ownership)
        made[num_ranks] = [edges_of(splits, layer) for layer in (0, 1)]
        rows = [split.input_ids.numel() for split in splits]
        print(f"{num_ranks} rank(s): edges {[len(edges) for edges in made[num_ranks]]}, rows to load {rows}")
    print("the same mini-batch:", made[1] == made[options.ranks])


if __name__ == "__main__":
    main()
