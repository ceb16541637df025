"""Neighbour sampling as a layer sampler: the in-edges that a draw takes, or all of them (fanout -1).

Three implementations of one protocol: ``HostNeighborSampler`` runs numba kernels on arrays, memory-mapped or not;
``TorchNeighborSampler`` runs torch operations on whatever device its tensors lie, and ``neighbor_triton`` kernels of
its own on devices that have Triton. They give equal layers. Memory of the host one: four bytes per vertex of the range,
and buffers of the size of the largest mini-batch so far; the others hold the rank's own edges on their device.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.files.mapped_files import check_files, files_behind
from gsplit.graph.graph import Graph
from gsplit.kernels.dispatch import kernel_for
from gsplit.sampling import kernels_numba as host
from gsplit.sampling.checks import check_own, cut_own_edges, raise_status
from gsplit.sampling.drawn import TensorFrontier
from gsplit.sampling.draws import UNIFORM, Draw
from gsplit.sampling.excluded import ExcludedEdges, drop_excluded
from gsplit.sampling.protocol import Fanout, LayerSampler, SampledLayer

__all__ = ["HostNeighborSampler", "TorchNeighborSampler", "check_fanouts", "make_sampler"]

MAX_FANOUT = 1 << 16


def check_fanouts(num_neighbors: Sequence[int]) -> None:
    """Refuse fanouts that cannot be drawn."""
    for fanout in num_neighbors:
        if not hasattr(fanout, "__index__") or not (fanout == -1 or 1 <= fanout <= MAX_FANOUT):
            fix = "give one positive number per layer, or -1 for all neighbours"
            raise InputError(explain("num_neighbors", f"-1 or 1 to {MAX_FANOUT} for every layer", fanout, fix))
    if not num_neighbors:
        raise InputError(
            explain("num_neighbors", "at least one layer", num_neighbors, "give one number per layer of the model")
        )


def make_sampler(
    graph: Graph,
    original_ids: npt.NDArray[np.int64],
    torch_device: torch.device,
    *,
    edge_ids: bool = False,
    draw: Draw = UNIFORM,
) -> LayerSampler:
    """The sampler for a device. With ``edge_ids`` sampled layers have the positions of their edges."""
    chosen = kernel_for("sample", torch_device)
    if chosen == "numba":
        return HostNeighborSampler(graph, original_ids, edge_ids=edge_ids, draw=draw)
    if chosen == "triton":
        from gsplit.sampling.neighbor_triton import TritonNeighborSampler

        return TritonNeighborSampler(graph, original_ids, torch_device, edge_ids=edge_ids, draw=draw)
    return TorchNeighborSampler(graph, original_ids, torch_device, edge_ids=edge_ids, draw=draw)


class HostNeighborSampler:
    """Samples in one rank's range with compiled kernels. ``original_ids`` is empty where ids are original."""

    excluded: ExcludedEdges | None = None

    def __init__(
        self, graph: Graph, original_ids: npt.NDArray[np.int64], *, edge_ids: bool = False, draw: Draw = UNIFORM
    ) -> None:
        self._graph = graph
        self._original = original_ids
        self._edge_ids = edge_ids
        self._draw = draw
        self._files = files_behind(graph.indptr, graph.indices, original_ids, draw.source_ids, draw.weights)
        self._row_of = np.full(graph.stop_vertex - graph.first_vertex, -1, np.int32)
        self._ids = np.empty(1 << 10, np.int64)
        self._open: HostFrontier | None = None

    def draw_layer(self, key: int, frontier: Ids, fanout: Fanout) -> tuple[Ids, Ids]:
        """Offsets of the in-edges drawn for every vertex of a frontier, and their positions in the graph."""
        assert isinstance(fanout, int)
        indptr = np.empty(frontier.size + 1, np.int64)
        self._draw.count(self._graph, frontier, fanout, indptr)
        places = np.empty(int(indptr[-1]), np.int64)
        self._draw.write_places(self._graph, self._original, key, frontier, fanout, indptr, places)
        return indptr, places

    def name_sources(self, sources: Ids, places: Ids) -> Ids:
        """The names of the sources of drawn edges among those of excluded edges."""
        return sources

    def sources_of(self, names: Ids) -> Ids:
        """The sources of edges from their names."""
        return names

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
        self._sampler = sampler
        self.num_rows = 0
        self.locate(torch.from_numpy(targets))
        assert self.num_rows == targets.size, "targets are not distinct"

    def ids(self, num_rows: int) -> Tensor:
        return torch.from_numpy(self._sampler._ids[:num_rows].copy())

    def _reserve(self, num_new: int) -> None:
        """Room for more rows; the buffer stays with the sampler, so that it grows only a few times."""
        held = self._sampler._ids
        if self.num_rows + num_new > held.size:
            larger = np.empty(max(2 * held.size, self.num_rows + num_new), np.int64)
            larger[: self.num_rows] = held[: self.num_rows]
            self._sampler._ids = larger

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        sampler, graph = self._sampler, self._sampler._graph
        frontier = sampler._ids[: self.num_rows]
        indptr, places = sampler.draw_layer(key, frontier, fanout)
        self._reserve(min(places.size, sampler._row_of.size))
        sources = np.empty_like(places) if sampler._edge_ids else places
        host.copy_sources(graph.indices, places, sources)
        if sampler.excluded is not None:
            excluded = sampler.excluded
            names = sampler.name_sources(sources, places)
            drop_excluded(frontier, indptr, names, places, excluded.src.numpy(), excluded.dst.numpy())
            sources = sampler.sources_of(names[: indptr[-1]])
            places = places[: indptr[-1]]
        status, self.num_rows, num_foreign = host.relabel_own(
            sources,
            graph.first_vertex,
            graph.stop_vertex,
            graph.num_vertices,
            sampler._ids,
            self.num_rows,
            sampler._row_of,
        )
        raise_status(status, graph)
        foreign = host.relabel_foreign(sources, num_foreign) if num_foreign else np.empty(0, np.int64)
        edge_ids = torch.from_numpy(places) if sampler._edge_ids else None
        return SampledLayer(torch.from_numpy(indptr), torch.from_numpy(sources), torch.from_numpy(foreign), edge_ids)

    def locate(self, ids: Tensor) -> Tensor:
        sampler = self._sampler
        wanted = ids.numpy()
        first = sampler._graph.first_vertex
        check_own(wanted, first, sampler._graph.stop_vertex)
        self._reserve(wanted.size)
        rows = np.empty(wanted.size, np.int64)
        self.num_rows = host.append_new(wanted, first, sampler._ids, self.num_rows, sampler._row_of, rows)
        return torch.from_numpy(rows)

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        host.place_foreign(drawn.sources.numpy(), foreign_rows.numpy())
        return drawn.sources

    def close(self) -> None:
        sampler = self._sampler
        host.clear_rows(sampler._ids[: self.num_rows], sampler._graph.first_vertex, sampler._row_of)
        self.num_rows = 0
        sampler._open = None


class TorchNeighborSampler:
    """Samples in one rank's range with torch operations; its own edges are copied to the device, and checked then."""

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
        self.edge_ids = edge_ids
        self.first_edge = own.first_edge
        self.indptr = torch.from_numpy(own.indptr).to(torch_device)
        self.indices = torch.from_numpy(own.indices).to(torch_device)
        original = original_ids if original_ids.size else np.arange(self.first, self.stop)
        self.original_ids = torch.from_numpy(np.array(original)).to(torch_device)

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""
        return self.original_ids.nbytes + self.draw.num_bytes

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range."""
        return self.num_bytes

    def draw_layer(self, key: int, ids: Tensor, fanout: Fanout) -> tuple[Tensor, Tensor]:
        """Offsets of the in-edges drawn for every vertex of a frontier, and their places among the own edges."""
        assert isinstance(fanout, int)
        rows = ids - self.first
        return self.draw.draw(self.indptr, rows, self.original_ids[rows], key, fanout)

    def name_sources(self, sources: Tensor, edge_ids: Tensor | None) -> Tensor:
        """The names of the sources of drawn edges among those of excluded edges."""
        return sources

    def start(self, targets: Tensor) -> TensorFrontier:
        """Begin a mini-batch from distinct own vertices."""
        return _TorchFrontier(self, targets)


class _TorchFrontier(TensorFrontier):
    def __init__(self, sampler: TorchNeighborSampler, targets: Tensor) -> None:
        super().__init__(targets, sampler.first, sampler.stop, sampler.indptr.device, sampler.excluded)
        self._sampler = sampler

    def _name_sources(self, vertices: Tensor, edge_ids: Tensor | None) -> Tensor:
        return self._sampler.name_sources(vertices, edge_ids)

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        sampler = self._sampler
        indptr, places = sampler.draw_layer(key, self._ids, fanout)
        vertices = sampler.indices[places].to(torch.int64)
        return indptr, vertices, places + sampler.first_edge if sampler.edge_ids else None
