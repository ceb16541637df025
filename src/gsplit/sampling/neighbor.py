"""Uniform neighbour sampling without replacement, and all neighbours (fanout -1), as a layer sampler.

Two implementations of one protocol: ``HostNeighborSampler`` runs numba kernels on arrays, memory-mapped or not;
``TorchNeighborSampler`` runs torch operations on whatever device its tensors lie. They give equal layers.
Memory of the host one: four bytes per vertex of the range, and buffers of the size of the largest mini-batch so far.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, StoreError, explain
from gsplit.graph import Graph
from gsplit.sampling import kernels_numba as host
from gsplit.sampling import kernels_torch as device
from gsplit.sampling.protocol import LayerSampler, SampledLayer

__all__ = ["HostNeighborSampler", "TorchNeighborSampler", "check_fanouts", "make_sampler"]

MAX_FANOUT = 1 << 16
_BUILT = "num_neighbors"


def check_fanouts(num_neighbors: list[int]) -> None:
    """Refuse what the samplers here cannot draw."""
    for fanout in num_neighbors:
        if not hasattr(fanout, "__index__") or not (fanout == -1 or 1 <= fanout <= MAX_FANOUT):
            fix = "give one positive number per layer, or -1 for all neighbours"
            raise InputError(explain(_BUILT, f"-1 or 1 to {MAX_FANOUT} for every layer", fanout, fix))
    if not num_neighbors:
        raise InputError(explain(_BUILT, "at least one layer", "none", "give one number per layer of the model"))


def make_sampler(graph: Graph, original_ids: npt.NDArray[np.int64], torch_device: torch.device) -> LayerSampler:
    """The sampler for a device: compiled kernels on the host, torch operations elsewhere."""
    if torch_device.type == "cpu":
        return HostNeighborSampler(graph, original_ids)
    return TorchNeighborSampler(graph, original_ids, torch_device)


class HostNeighborSampler:
    """Samples in one rank's range with compiled kernels. ``original_ids`` is empty where ids are original."""

    def __init__(self, graph: Graph, original_ids: npt.NDArray[np.int64]) -> None:
        self._graph, self._original = graph, original_ids
        self._row_of = np.full(graph.stop_vertex - graph.first_vertex, -1, np.int32)
        self._ids = np.empty(1 << 10, np.int64)
        self._open: HostFrontier | None = None

    def start(self, targets: Tensor) -> "HostFrontier":
        """Begin a mini-batch from distinct own vertices."""
        if self._open is not None:
            self._open.close()  # left by an error
        self._open = HostFrontier(self, targets.numpy())
        return self._open

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches."""
        return self._row_of.nbytes + self._ids.nbytes

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range."""
        return self._row_of.nbytes


class HostFrontier:
    """See ``protocol.Frontier``."""

    def __init__(self, sampler: HostNeighborSampler, targets: npt.NDArray[np.int64]) -> None:
        self._sampler, self.num_rows = sampler, 0
        self.locate(torch.from_numpy(targets))
        assert self.num_rows == targets.size, "targets are not distinct"

    def ids(self, num_rows: int) -> Tensor:
        """Vertex ids of the first ``num_rows`` rows, as a tensor of their own."""
        return torch.from_numpy(self._sampler._ids[:num_rows].copy())

    def _reserve(self, num_new: int) -> None:
        """Room for more rows; the buffer stays with the sampler, so that it grows only a few times."""
        held = self._sampler._ids
        if self.num_rows + num_new > held.size:
            larger = np.empty(max(2 * held.size, self.num_rows + num_new), np.int64)
            larger[: self.num_rows] = held[: self.num_rows]
            self._sampler._ids = larger

    def sample_layer(self, key: int, fanout: int) -> SampledLayer:
        """Draw in-edges for every row so far; own sources that are new are appended."""
        sampler, graph = self._sampler, self._sampler._graph
        first = graph.first_vertex
        indptr = np.empty(self.num_rows + 1, np.int64)
        frontier = sampler._ids[: self.num_rows]
        raise_status(host.count_layer(graph.indptr, graph.indices.size, first, frontier, fanout, indptr))
        sources = np.empty(int(indptr[-1]), np.int64)
        self._reserve(min(sources.size, sampler._row_of.size))
        host.draw_layer(
            graph.indptr, graph.indices, first, sampler._original, np.uint64(key), frontier, indptr, sources
        )
        status, self.num_rows, num_foreign = host.relabel_own(
            sources, first, graph.stop_vertex, graph.num_vertices, sampler._ids, self.num_rows, sampler._row_of
        )
        raise_status(status)
        foreign = host.relabel_foreign(sources, num_foreign) if num_foreign else np.empty(0, np.int64)
        return SampledLayer(torch.from_numpy(indptr), torch.from_numpy(sources), torch.from_numpy(foreign))

    def locate(self, ids: Tensor) -> Tensor:
        """Rows of some own vertices; those that are new are appended in order."""
        sampler, wanted = self._sampler, ids.numpy()
        first = sampler._graph.first_vertex
        _check_own(wanted, first, sampler._graph.stop_vertex)
        self._reserve(wanted.size)
        rows = np.empty(wanted.size, np.int64)
        self.num_rows = host.append_new(wanted, first, sampler._ids, self.num_rows, sampler._row_of, rows)
        return torch.from_numpy(rows)

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        """The sources of a layer with each foreign slot replaced by its row, in place."""
        host.place_foreign(drawn.sources.numpy(), foreign_rows.numpy())
        return drawn.sources

    def close(self) -> None:
        """Forget this mini-batch."""
        sampler = self._sampler
        host.forget_rows(sampler._ids[: self.num_rows], sampler._graph.first_vertex, sampler._row_of)
        self.num_rows = 0
        sampler._open = None


def raise_status(status: int) -> None:
    if status == host.DAMAGED:
        fix = "run gsplit inspect --verify, then restore the store or import it again"
        raise StoreError(explain("the graph", "offsets and ids in range", "others", fix))
    if status == host.TOO_MANY:
        raise StoreError(explain("the graph", "fewer than 2**32 in-edges per vertex", "more", "cut the hub's edges"))


def _check_own(ids: Any, first: int, stop: int) -> None:
    if ids.size and not first <= int(ids.min()) <= int(ids.max()) < stop:
        fix = "open the same store on every rank"
        raise InputError(explain("ids", f"vertices of this rank, {first}..{stop - 1}", "others", fix))


class TorchNeighborSampler:
    """Samples in one rank's range with torch operations; the graph is copied to the device."""

    def __init__(self, graph: Graph, original_ids: npt.NDArray[np.int64], torch_device: torch.device) -> None:
        self.first, self.stop = graph.first_vertex, graph.stop_vertex
        self.indptr = torch.from_numpy(np.array(graph.indptr)).to(torch_device)
        self.indices = torch.from_numpy(np.array(graph.indices)).to(torch_device)
        original = original_ids if original_ids.size else np.arange(self.first, self.stop)
        self.original_ids = torch.from_numpy(np.array(original)).to(torch_device)

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""
        return self.original_ids.nbytes

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range."""
        return self.original_ids.nbytes

    def start(self, targets: Tensor) -> "TorchFrontier":
        """Begin a mini-batch from distinct own vertices."""
        return TorchFrontier(self, targets)


class TorchFrontier:
    """See ``protocol.Frontier``."""

    def __init__(self, sampler: TorchNeighborSampler, targets: Tensor) -> None:
        self._sampler, self._ids = sampler, targets

    @property
    def num_rows(self) -> int:
        """Vertices so far."""
        return self._ids.numel()

    def ids(self, num_rows: int) -> Tensor:
        """Vertex ids of the first ``num_rows`` rows."""
        return self._ids[:num_rows]

    def sample_layer(self, key: int, fanout: int) -> SampledLayer:
        """Draw in-edges for every row so far; own sources that are new are appended."""
        sampler = self._sampler
        rows = self._ids - sampler.first
        indptr = device.count_layer(sampler.indptr, rows, fanout)
        drawn = device.draw_sources(sampler.indptr, sampler.indices, rows, sampler.original_ids[rows], key, indptr)
        own = (drawn >= sampler.first) & (drawn < sampler.stop)
        foreign_ids, slots = device.first_seen(drawn[~own], 0)
        sources = torch.empty_like(drawn)
        sources[own] = self.locate(drawn[own])
        sources[~own] = -1 - slots
        return SampledLayer(indptr, sources, foreign_ids)

    def locate(self, ids: Tensor) -> Tensor:
        """Rows of some own vertices; those that are new are appended in order."""
        known = self.num_rows
        self._ids, places = device.first_seen(torch.cat([self._ids, ids]), known)
        return places[known:]

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        """The sources of a layer with each foreign slot replaced by its row."""
        if foreign_rows.numel() == 0:
            return drawn.sources
        slots = (-1 - drawn.sources).clamp(min=0)
        return torch.where(drawn.sources < 0, foreign_rows[slots], drawn.sources)

    def close(self) -> None:
        """Forget this mini-batch."""
        self._ids = self._ids[:0]
