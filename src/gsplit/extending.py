"""What a program writes to give the loader a sampler, or a source of feature rows, of its own.

``NeighborLoader(sampler=f)``: f makes the ``DrawnSampler`` of a ``SampledRange``, from a function that draws in-edges.
``NeighborLoader(features=source)``: a ``RowSource``, asked for ORIGINAL ids. Both are for every number of ranks: what
they return may depend on the vertex and the key, and on nothing else.
"""

from gsplit.features.protocol import RowSource, RowsRead
from gsplit.graph.graph import Graph
from gsplit.keys.kernels_torch import mix
from gsplit.sampling.drawn import DrawnSampler, EdgeDraw
from gsplit.sampling.protocol import SampledRange, SamplerFactory

__all__ = [
    "DrawnSampler",
    "EdgeDraw",
    "Graph",
    "RowSource",
    "RowsRead",
    "SampledRange",
    "SamplerFactory",
    "mix",
]
