"""Neighbour sampling on a device with Triton kernels: the third implementation of ``protocol.LayerSampler``.

Its layers are those of the host's sampler, index by index. Kernels draw uniformly; other draws are those of torch
operations. Device memory: the rank's own edges, their offsets, original
ids where they differ, and four bytes per vertex of the range; during a layer a hash table of up to 48 bytes per edge
drawn. The host waits twice for a layer (how many edges, how many vertices are new) and once for ``locate``.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.graph.graph import Graph
from gsplit.kernels.triton.relabelling import UNSEEN, relabel
from gsplit.kernels.triton.sampling import MAX_FANOUT, count_layer, draw_sources
from gsplit.sampling.checks import cut_own_edges, not_own
from gsplit.sampling.drawn import TensorFrontier
from gsplit.sampling.draws import UNIFORM, Draw
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.protocol import Fanout, SampledLayer

__all__ = ["TritonFrontier", "TritonNeighborSampler"]


class TritonNeighborSampler:
    """Samples in one rank's range with Triton kernels. ``original_ids`` is empty where ids are original."""

    excluded: ExcludedEdges | None = None

    def __init__(
        self,
        graph: Graph,
        original_ids: npt.NDArray[np.int64],
        torch_device: torch.device,
        *,
        edge_ids: bool = False,
        draw: Draw = UNIFORM,
    ) -> None:
        own = cut_own_edges(graph)
        self.draw = draw.copy_to(own, torch_device)
        self.first = graph.first_vertex
        self.stop = graph.stop_vertex
        self.first_edge = own.first_edge
        self.edge_ids = edge_ids
        self.is_whole = (self.first, self.stop) == (0, graph.num_vertices)
        self.indptr = torch.from_numpy(own.indptr).to(torch_device)
        self.indices = torch.from_numpy(own.indices).to(torch_device)
        self.original_ids = torch.from_numpy(np.array(original_ids)).to(torch_device)
        self.state = torch.full((self.stop - self.first,), UNSEEN, dtype=torch.int32, device=torch_device)
        self._open: TritonFrontier | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""
        return self.state.nbytes + self.original_ids.nbytes + self.draw.num_bytes

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range."""
        return self.num_bytes

    def start(self, targets: Tensor) -> "TritonFrontier":
        """Begin a mini-batch from distinct own vertices."""
        if self._open is not None:
            self._open.close()  # left by an error
        self._open = TritonFrontier(self, targets)
        return self._open

    def end(self) -> None:
        """Note that no frontier is open."""
        self._open = None


class TritonFrontier(TensorFrontier):
    """See ``protocol.Frontier``."""

    def __init__(self, sampler: TritonNeighborSampler, targets: Tensor) -> None:
        super().__init__(targets[:0], sampler.first, sampler.stop, sampler.excluded)
        self._sampler = sampler
        self._half_done = False
        try:
            self.locate(targets)
            assert self.num_rows == targets.numel(), "targets are not distinct"
        except BaseException:
            self._clear_all()
            raise

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        indptr, vertices, edge_ids = self._draw_included(key, fanout)
        found = self._relabel(vertices, foreign=not self._sampler.is_whole)
        assert found is not None, "ids were checked when the graph was copied"
        rows, new_ids, foreign_ids = found
        self._ids = torch.cat([self._ids, new_ids])
        return SampledLayer(indptr, rows, foreign_ids, edge_ids)

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(fanout, int)
        sampler, ids = self._sampler, self._ids
        first_edge = sampler.first_edge if sampler.edge_ids else None
        if sampler.draw.is_uniform and fanout <= MAX_FANOUT:
            indptr = count_layer(sampler.indptr, sampler.first, ids, fanout)
            sources, edge_ids = draw_sources(
                sampler.indptr,
                sampler.indices,
                sampler.first,
                sampler.original_ids,
                key=key,
                frontier=ids,
                fanout=fanout,
                out_indptr=indptr,
                num_edges=int(indptr[-1]),  # device sync
                first_edge=first_edge,
            )
            return indptr, sources, edge_ids
        rows = ids - sampler.first
        names = sampler.original_ids[rows] if sampler.original_ids.numel() else ids
        indptr, places = sampler.draw.draw(sampler.indptr, rows, names, key, fanout)
        sources = sampler.indices[places].to(torch.int64)
        return indptr, sources, None if first_edge is None else places + first_edge

    def locate(self, ids: Tensor) -> Tensor:
        sampler = self._sampler
        found = self._relabel(ids, foreign=False)
        if found is None:  # noticed without a wait of its own
            self._clear_all()
            raise not_own(int(ids.min()), int(ids.max()), sampler.first, sampler.stop)
        rows, new_ids, _ = found
        self._ids = torch.cat([self._ids, new_ids])
        return rows

    def _relabel(self, ids: Tensor, *, foreign: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """See ``relabel``; ``close`` clears what an error in the middle of it leaves behind."""
        sampler = self._sampler
        self._half_done = True
        found = relabel(ids, sampler.first, sampler.stop, self.num_rows, sampler.state, foreign=foreign)
        self._half_done = False
        return found

    def close(self) -> None:
        sampler = self._sampler
        if self._half_done:
            self._clear_all()
        sampler.state.index_fill_(0, self._ids - sampler.first, UNSEEN)
        super().close()
        sampler.end()

    def _clear_all(self) -> None:
        """After an error, also vertices that were found and have no row yet."""
        self._sampler.state.fill_(UNSEEN)
        self._ids = self._ids[:0]
