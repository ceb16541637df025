"""The protocols for user-defined samplers and sources of feature rows.

``NeighborLoader(sampler=f)``: f makes the ``DrawnSampler`` of a ``SampledRange``, from a function that draws in-edges.
``NeighborLoader(features=source)``: a ``RowSource``, which is called with ORIGINAL ids. To be correct on any number of
ranks, what they return must depend only on the vertex and the key.
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
