"""What a layer sampler is: the first half of every layer of a step, before anything crosses between ranks.

A rank starts a ``Frontier`` from its targets of the step, then for each layer from the top down draws the
in-edges of all its rows (``sample_layer``) and, after the exchange, finds the rows that other ranks request
(``locate``). Rows are only ever appended, so every local frontier is a prefix of the one below it (law 4).
Ids cross between ranks through the host. So a frontier on a device takes ids on the host too, and lists foreign ids
there: sizes and ids come down in one wait.
What is drawn for a vertex depends on the layer's key, the vertex's original id and its neighbour list alone (law 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.graph.graph import Graph
from gsplit.graph.ownership import original_ids_of
from gsplit.sampling.excluded import ExcludedEdges

__all__ = ["Fanout", "Frontier", "LayerSampler", "SampledLayer", "SampledRange", "SamplerFactory"]


Fanout = int | tuple[int, ...]
"""The number of neighbours to draw at a layer, or one number for every relation of a heterogeneous graph."""


@dataclass(frozen=True, slots=True)
class SampledRange:
    """What a sampler is made for: the vertices whose in-edges one rank draws, those it owns or all.

    Ids, those in ``graph`` included, are the store's. ``original_ids`` are those of the range, in its order, and empty
    where the store's ids are original. ``device``: where ids are and layers must be. ``edge_ids``: whether layers need
    the positions of their edges, because values of edges are loaded.
    """

    graph: Graph
    original_ids: npt.NDArray[np.int64]
    device: torch.device
    edge_ids: bool = False

    def to_original_ids(self, ids: Tensor) -> Tensor:
        """Original ids of some vertices of the range: what a draw may depend on, with the key."""
        return original_ids_of(ids, self.original_ids, self.graph.first_vertex)


@dataclass(frozen=True, slots=True)
class SampledLayer:
    """In-edges drawn for the first ``num_dst`` rows of a frontier, destination after destination.

    ``sources[indptr[i] : indptr[i + 1]]`` are the sources of row i: a row of the local frontier, or ``-1 - slot``
    for the vertex ``foreign_ids[slot]``, which another rank owns. Foreign ids are listed once, on the host, in order of
    first occurrence. ``edge_ids`` are the edges' positions in the graph, from a sampler made with ``edge_ids``.
    """

    indptr: Tensor
    sources: Tensor
    foreign_ids: Tensor
    edge_ids: Tensor | None = None

    @property
    def num_dst(self) -> int:
        """Rows whose in-edges were drawn."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Edges drawn."""
        return self.sources.numel()


class Frontier(Protocol):
    """The vertices of one mini-batch that one rank owns, row by row, as they are found. Close it after use."""

    @property
    def num_rows(self) -> int:
        """Vertices so far."""

    def ids(self, num_rows: int) -> Tensor:
        """Vertex ids of the first ``num_rows`` rows, as a tensor of their own."""

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        """Draw in-edges for every row so far; own sources that are new are appended."""

    def locate(self, ids: Tensor) -> Tensor:
        """Rows of some own vertices; those that are new are appended in order."""

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        """The sources of a layer with each foreign slot replaced by its row; may reuse the layer's memory.

        ``foreign_rows`` may be on the host.
        """

    def close(self) -> None:
        """End this mini-batch."""


class LayerSampler(Protocol):
    """Draws neighbours in one rank's range of vertices. One frontier is open at a time.

    ``excluded``: edges that are left out of the next mini-batches, after the draw.
    """

    excluded: ExcludedEdges | None

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range, not of the batch."""

    def start(self, targets: Tensor) -> Frontier:
        """Begin a mini-batch from distinct own vertices."""


SamplerFactory = Callable[[SampledRange], LayerSampler]
"""Makes the sampler of a range of vertices; called once for every range that a rank samples, two under some
strategies."""
