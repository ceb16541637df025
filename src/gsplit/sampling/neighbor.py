"""Uniform neighbour sampling without replacement, and all neighbours (fanout -1), as a layer sampler.

Three implementations of one protocol: ``HostNeighborSampler`` runs numba kernels on arrays, memory-mapped or not;
``TorchNeighborSampler`` runs torch operations on whatever device its tensors lie, and ``neighbor_triton`` kernels of
its own on devices that have Triton. They give equal layers. Memory of the host one: four bytes per vertex of the range,
and buffers of the size of the largest mini-batch so far; the others hold the rank's own edges on their device.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.files.mapped_files import check_files, files_behind
from gsplit.graph.graph import Graph
from gsplit.kernels.dispatch import kernel_for
from gsplit.sampling import kernels_numba as host
from gsplit.sampling import kernels_torch as device
from gsplit.sampling.checks import check_own, cut_own_edges, raise_status
from gsplit.sampling.protocol import LayerSampler, SampledLayer, SampledRange

__all__ = ["HostNeighborSampler", "TorchNeighborSampler", "check_fanouts", "make_sampler", "uniform_sampler"]

MAX_FANOUT = 1 << 16


def check_fanouts(num_neighbors: list[int]) -> None:
    """Refuse what the samplers here cannot draw."""
    for fanout in num_neighbors:
        if not hasattr(fanout, "__index__") or not (fanout == -1 or 1 <= fanout <= MAX_FANOUT):
            fix = "give one positive number per layer, or -1 for all neighbours"
            raise InputError(explain("num_neighbors", f"-1 or 1 to {MAX_FANOUT} for every layer", fanout, fix))
    if not num_neighbors:
        raise InputError(
            explain("num_neighbors", "at least one layer", "none", "give one number per layer of the model")
        )


def make_sampler(
    graph: Graph, original_ids: npt.NDArray[np.int64], torch_device: torch.device, *, edge_ids: bool = False
) -> LayerSampler:
    """The sampler for a device.

    With ``edge_ids`` sampled layers say which stored edges they are made of.
    """
    chosen = kernel_for("sample", torch_device)
    if chosen == "numba":
        return HostNeighborSampler(graph, original_ids, edge_ids=edge_ids)
    if chosen == "triton":
        from gsplit.sampling.neighbor_triton import TritonNeighborSampler

        return TritonNeighborSampler(graph, original_ids, torch_device, edge_ids=edge_ids)
    return TorchNeighborSampler(graph, original_ids, torch_device, edge_ids=edge_ids)


def uniform_sampler(part: SampledRange) -> LayerSampler:
    """See ``SamplerFactory``: the sampler that is built in."""
    return make_sampler(part.graph, part.original_ids, part.device, edge_ids=part.edge_ids)


class HostNeighborSampler:
    """Samples in one rank's range with compiled kernels. ``original_ids`` is empty where ids are original."""

    def __init__(self, graph: Graph, original_ids: npt.NDArray[np.int64], *, edge_ids: bool = False) -> None:
        self._graph, self._original, self._edge_ids = graph, original_ids, edge_ids
        self._files = files_behind(graph.indptr, graph.indices, original_ids)
        self._row_of = np.full(graph.stop_vertex - graph.first_vertex, -1, np.int32)
        self._ids = np.empty(1 << 10, np.int64)
        self._open: HostFrontier | None = None

    def start(self, targets: Tensor) -> "HostFrontier":
        """Begin a mini-batch from distinct own vertices."""
        if self._open is not None:
            self._open.close()  # left by an error
        check_files(self._files)
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
        raise_status(host.count_layer(graph.indptr, graph.indices.size, first, frontier, fanout, indptr), graph)
        places = np.empty(int(indptr[-1]), np.int64)
        self._reserve(min(places.size, sampler._row_of.size))
        host.draw_places(graph.indptr, first, sampler._original, np.uint64(key), frontier, indptr, places)
        sources = np.empty_like(places) if sampler._edge_ids else places
        host.copy_sources(graph.indices, places, sources)
        status, self.num_rows, num_foreign = host.relabel_own(
            sources, first, graph.stop_vertex, graph.num_vertices, sampler._ids, self.num_rows, sampler._row_of
        )
        raise_status(status, graph)
        foreign = host.relabel_foreign(sources, num_foreign) if num_foreign else np.empty(0, np.int64)
        edge_ids = torch.from_numpy(places) if sampler._edge_ids else None
        return SampledLayer(torch.from_numpy(indptr), torch.from_numpy(sources), torch.from_numpy(foreign), edge_ids)

    def locate(self, ids: Tensor) -> Tensor:
        """Rows of some own vertices; those that are new are appended in order."""
        sampler, wanted = self._sampler, ids.numpy()
        first = sampler._graph.first_vertex
        check_own(wanted, first, sampler._graph.stop_vertex)
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


class TorchNeighborSampler:
    """Samples in one rank's range with torch operations; its own edges are copied to the device, and checked then."""

    def __init__(
        self,
        graph: Graph,
        original_ids: npt.NDArray[np.int64],
        torch_device: torch.device,
        *,
        edge_ids: bool = False,
    ) -> None:
        self.first, self.stop, self.edge_ids = graph.first_vertex, graph.stop_vertex, edge_ids
        own = cut_own_edges(graph)
        self.first_edge = own.first_edge
        self.indptr = torch.from_numpy(own.indptr).to(torch_device)
        self.indices = torch.from_numpy(own.indices).to(torch_device)
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
        self._check(targets)

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
        places = device.draw_places(sampler.indptr, rows, sampler.original_ids[rows], key, indptr)
        drawn = sampler.indices[places].to(torch.int64)
        own = (drawn >= sampler.first) & (drawn < sampler.stop)
        foreign_ids, slots = device.first_seen(drawn[~own], 0)
        sources = torch.empty_like(drawn)
        sources[own] = self._append(drawn[own])
        sources[~own] = -1 - slots
        return SampledLayer(indptr, sources, foreign_ids, places + sampler.first_edge if sampler.edge_ids else None)

    def locate(self, ids: Tensor) -> Tensor:
        """Rows of some own vertices; those that are new are appended in order."""
        self._check(ids)
        return self._append(ids)

    def _check(self, ids: Tensor) -> None:
        """Ids on a device are trusted: to look at them would make the host wait, and their sender chose this rank."""
        if ids.device.type == "cpu":
            check_own(ids.numpy(), self._sampler.first, self._sampler.stop)

    def _append(self, ids: Tensor) -> Tensor:
        known = self.num_rows
        self._ids, places = device.first_seen(torch.cat([self._ids, ids]), known)
        return places[known:]

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        """The sources of a layer with each foreign slot replaced by its row."""
        return device.place_foreign(drawn.sources, foreign_rows)

    def close(self) -> None:
        """Forget this mini-batch."""
        self._ids = self._ids[:0]
