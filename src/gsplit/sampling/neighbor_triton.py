"""Neighbour sampling on a device with Triton kernels: the third implementation of ``protocol.LayerSampler``.

Its layers are those of the host's sampler, index by index. Kernels draw uniformly; other draws are those of torch
operations. Device memory: the rank's own edges, their offsets and original ids where they differ, once for all samplers
of a process (``DeviceEdges``); per sampler four bytes per vertex of the range; during a layer a hash table of up to 48
bytes per edge. If the edges do not fit beside ``DEVICE_MARGIN``, the first of them are there, which are those of the
hottest vertices if the rank has one part, and the device reads the others from registered host memory.

The host waits once in ``sample_layer``, for the sizes of the layer and the foreign ids together, and once in
``locate``, for the number of new vertices. So a layer is drawn into memory for the most edges it can have; a fanout of
-1, excluded edges and draws that are not uniform cost more waits.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array
from gsplit.device.devices import DEVICE_MARGIN, AsyncHostCopy, free_memory, new_pages, register_memory
from gsplit.errors import InputError, explain
from gsplit.graph.graph import Graph
from gsplit.kernels.triton.gather import gather_rows
from gsplit.kernels.triton.relabelling import UNSEEN, Relabelled, num_found, relabel
from gsplit.kernels.triton.sampling import MAX_FANOUT, count_layer, draw_sources
from gsplit.sampling.checks import cut_own_edges
from gsplit.sampling.drawn import TensorFrontier
from gsplit.sampling.draws import UNIFORM, Draw, TorchDraw
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.protocol import Fanout, SampledLayer

__all__ = ["DeviceEdges", "TritonFrontier", "TritonNeighborSampler"]


def _place_edges(indices: Array, device: torch.device) -> tuple[Tensor, Tensor, Callable[[], object] | None]:
    """The first edges, on the device, and all of them, where the device can read them. Also returns how to end that."""
    edges = torch.from_numpy(indices)
    room = edges.nbytes if device.type == "cpu" else max(0, free_memory(device) - DEVICE_MARGIN)
    if edges.nbytes <= room:
        on_device = edges.to(device)
        return on_device, on_device, None
    pages = new_pages((edges.numel(),), edges.dtype).copy_(edges)
    release = register_memory(pages, device)
    if release is None:
        expected = f"{edges.nbytes:,} bytes of {device} for edges, or a driver that lets it read host memory"
        got = f"{room:,} bytes beside {DEVICE_MARGIN:,} for training"
        raise InputError(explain("sample_device", expected, got, "leave it out, so that the host samples"))
    return pages[: room // edges.element_size()].to(device), pages, release


@dataclass(frozen=True, eq=False)
class DeviceEdges:
    """A rank's edges as a device reads them. ``indices``: all of them; ``cached``: the first, in the device's memory.

    ``arrays``: the host arrays that they were made from. ``draw`` has what it reads by edge.
    """

    arrays: tuple[Array, ...]
    first_edge: int
    indptr: Tensor
    cached: Tensor
    indices: Tensor
    original_ids: Tensor
    draw: TorchDraw


_OPEN: "weakref.WeakValueDictionary[tuple[object, ...], DeviceEdges]" = weakref.WeakValueDictionary()
"""Edges that samplers of this process use, so that threads and loaders of the same graph share them."""
_OPENING = threading.Lock()


def _open_edges(graph: Graph, original_ids: npt.NDArray[np.int64], draw: Draw, device: torch.device) -> DeviceEdges:
    """The edges of a graph on a device, which samplers of the same arrays share."""
    arrays = (graph.indptr, graph.indices, original_ids, draw.source_ids, draw.weights)
    addresses = tuple((array.ctypes.data, array.size) if array.size else None for array in arrays)
    key = (device, draw.options, *addresses)  # of arrays that live as long as the edges
    with _OPENING:
        return _OPEN.get(key) or _OPEN.setdefault(key, _copy_edges(graph, arrays, draw, device))


def _copy_edges(graph: Graph, arrays: tuple[Array, ...], draw: Draw, device: torch.device) -> DeviceEdges:
    own = cut_own_edges(graph)
    drawn = draw.copy_to(own, device)
    indptr = torch.from_numpy(own.indptr).to(device)
    cached, indices, release = _place_edges(own.indices, device)
    original_ids = torch.from_numpy(np.array(arrays[2])).to(device)
    edges = DeviceEdges(arrays, own.first_edge, indptr, cached, indices, original_ids, drawn)
    if release is not None:
        weakref.finalize(edges, release).atexit = False  # before the memory is freed; not needed at exit
    return edges


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
        self.edges = _open_edges(graph, original_ids, draw, torch_device)
        self.first = graph.first_vertex
        self.stop = graph.stop_vertex
        self.edge_ids = edge_ids
        self.is_whole = (self.first, self.stop) == (0, graph.num_vertices)
        self.state = torch.full((self.stop - self.first,), UNSEEN, dtype=torch.int32, device=torch_device)
        self._open: TritonFrontier | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""
        return self.state.nbytes + self.edges.original_ids.nbytes + self.edges.draw.num_bytes

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
        super().__init__(targets, sampler.first, sampler.stop, sampler.state.device, sampler.excluded)
        self._sampler = sampler
        self._half_done = False
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=sampler.state.device)
        sampler.state.index_copy_(0, self._ids - sampler.first, -1 - rows)

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        self._half_done = True
        indptr, vertices, edge_ids = self._draw_included(key, fanout)
        found = self._relabel(vertices, foreign=not self._sampler.is_whole)
        host = AsyncHostCopy(torch.cat([indptr[-1:], found.total, found.foreign_ids])).read()  # device sync
        num_edges = int(host[0])
        num_new, num_foreign = num_found(int(host[1]))
        self._append_rows(found.new_ids[:num_new])
        return SampledLayer(
            indptr,
            found.rows[:num_edges],
            host[2 : 2 + num_foreign],
            None if edge_ids is None else edge_ids[:num_edges],
        )

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        """See the base; without excluded edges, sources may be followed by -1."""
        assert isinstance(fanout, int)
        sampler, edges, ids = self._sampler, self._sampler.edges, self._ids
        first_edge = edges.first_edge if sampler.edge_ids else None
        if edges.draw.is_uniform and fanout <= MAX_FANOUT:
            indptr = count_layer(edges.indptr, sampler.first, ids, fanout)
            is_bounded = fanout >= 0 and self._excluded is None
            sources, edge_ids = draw_sources(
                edges.indptr,
                edges.cached,
                edges.indices,
                sampler.first,
                edges.original_ids,
                key=key,
                frontier=ids,
                fanout=fanout,
                out_indptr=indptr,
                most_edges=min(fanout * ids.numel(), edges.indices.numel())
                if is_bounded
                else int(indptr[-1]),  # device sync
                first_edge=first_edge,
            )
            return indptr, sources, edge_ids
        rows = ids - sampler.first
        names = edges.original_ids[rows] if edges.original_ids.numel() else ids
        indptr, places = edges.draw.draw(edges.indptr, rows, names, key, fanout)
        sources = torch.empty(places.numel(), 1, dtype=edges.indices.dtype, device=ids.device)
        gather_rows(edges.cached.view(-1, 1), edges.indices.view(-1, 1), places, sources)
        sources = sources.view(-1).to(torch.int64)
        return indptr, sources, None if first_edge is None else places + first_edge

    def locate(self, ids: Tensor) -> Tensor:
        wanted = self._take(ids)
        if not wanted.numel():
            return wanted
        self._half_done = True
        found = self._relabel(wanted, foreign=False)
        num_new, _ = num_found(int(AsyncHostCopy(found.total).read()))  # device sync
        self._append_rows(found.new_ids[:num_new])
        return found.rows

    def _relabel(self, ids: Tensor, *, foreign: bool) -> Relabelled:
        sampler = self._sampler
        return relabel(ids, sampler.first, sampler.stop, self.num_rows, sampler.state, foreign=foreign)

    def _append_rows(self, new_ids: Tensor) -> None:
        self._ids = torch.cat([self._ids, new_ids])
        self._half_done = False

    def close(self) -> None:
        sampler = self._sampler
        if self._half_done:  # after an error: vertices that were found and have no row yet
            sampler.state.fill_(UNSEEN)
        sampler.state.index_fill_(0, self._ids - sampler.first, UNSEEN)
        super().close()
        sampler.end()
