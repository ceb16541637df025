"""GSplit's compiled sampler with PyG's sampler interface, for machines without pyg-lib and torch-sparse.

PyG's NeighborLoader needs one of those two compiled packages. ``sampler_if_needed`` returns None if one of them is
installed, and the loader then uses it.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.importers.pyg import memory_store


def sampler_if_needed(data: Data, num_neighbors: list[int]) -> "NumbaSampler | None":
    if find_spec("pyg_lib") is not None or find_spec("torch_sparse") is not None:
        return None
    return NumbaSampler(data, num_neighbors)


class NumbaSampler(BaseSampler):  # type: ignore[misc]
    """Samples the in-edges of each layer, with a different sample in every call."""

    def __init__(self, data: Data, num_neighbors: list[int]) -> None:
        store: Any = memory_store(data, None)
        self._sampler = make_sampler(store.graph, store.original_ids(), torch.device("cpu"))
        self._num_neighbors, self._calls = num_neighbors, 0

    def sample_from_nodes(self, inputs: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        self._calls += 1
        drawn = sample_minibatch(self._sampler, inputs.node, self._num_neighbors, StepKey(0, 0, self._calls))
        edges = torch.cat([block.edge_index() for block in drawn.blocks], dim=1)
        num_rows = drawn.input_ids.numel()
        keys = torch.unique(edges[0] * num_rows + edges[1])  # many times faster than torch.unique(edges, dim=1)
        return SamplerOutput(
            drawn.input_ids, keys // num_rows, keys % num_rows, edge=None, metadata=(inputs.input_id, inputs.time)
        )

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        raise NotImplementedError("this sampler starts from vertices")

    @property
    def edge_permutation(self) -> None:
        return None
