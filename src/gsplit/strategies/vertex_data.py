"""What a strategy reads for the vertices of a step: input rows, labels, original ids, and GCN's factors."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.features.mapped import MappedRows
from gsplit.graph import Graph
from gsplit.kernels.jit import kernel

__all__ = ["VertexData", "gcn_factors"]


@dataclass(frozen=True)
class VertexData:
    """Per-vertex arrays of the vertices a rank loads itself; None where the graph has none, or nobody asked."""

    features: MappedRows
    labels: MappedRows | None
    original_ids: MappedRows | None
    factors: MappedRows | None

    def take_labels(self, ids: Tensor, device: torch.device) -> Tensor | None:
        """Labels of some vertices."""
        return None if self.labels is None else self.labels.take(ids).to(device)

    def name(self, ids: Tensor, device: torch.device) -> Tensor:
        """Original ids of some vertices."""
        return ids if self.original_ids is None else self.original_ids.take(ids).to(device)

    def read_features(self, ids: Tensor, out: Tensor) -> None:
        """Input rows of some vertices, into a tensor on any device."""
        if out.device.type == "cpu":
            self.features.read(ids, out)
        else:
            out.copy_(self.features.take(ids))


def gcn_factors(graph: Graph) -> MappedRows:
    """1 / sqrt(degree) of every vertex held, for GCN: weight(u -> v) is the product of both ends' factors.

    The degree is that of PyG's ``gcn_norm``: in-edges without self-loops, plus one. It is a property of the whole
    graph, so blocks give the weights that the full graph would.
    """
    factors = 1.0 / np.sqrt(_in_degrees(graph.indptr, graph.indices, graph.first_vertex) + 1.0)
    return MappedRows("gcn factors", factors, torch.float64, graph.first_vertex)


@kernel
def _in_degrees(indptr: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.int64]:
    out = np.zeros(indptr.size - 1, np.int64)
    for row in range(out.size):
        for edge in range(max(indptr[row], 0), min(indptr[row + 1], indices.size)):
            out[row] += indices[edge] != first + row
    return out
