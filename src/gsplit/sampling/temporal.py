"""Temporal draws: in-edges that are not later than the time of the target.

What is computed for a vertex depends on the time of the target that reached it, so a row is a pair (vertex, time). The
times are the S distinct ones of the targets of the step, ascending and the same on every rank. The pair of vertex v and
the time in slot s is the id v * S + s. These ids are a graph like any other: owners have ranges (boundaries times S),
an in-edge of (v, s) comes from (u, s), and ``minibatch.split`` runs on them unchanged.

In the order of time, the in-edges of a vertex that are not later than t are a prefix, found by bisection. From these m
edges a row draws

    uniform   as ``neighbor`` draws from a column of m edges, with the word mix(K, mix(v, t)) in place of mix(K, v)
    last      the k latest

for layer key K, original id v and fanout k. Edges of equal time are ordered by source. The slot is not part of the key:
a draw depends on the key, the vertex, the time and the in-edges alone (law 1).

The targets of a step of pairs are (endpoint, time of the pair), and the edges of its pairs are excluded at every time.

The columns of a store stay in the order of their sources; ``store.time_order`` has the order by time. There is a
compiled version for the host and a version in torch operations for devices, which give equal layers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.files.mapped_files import check_files, files_behind
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.jit import kernel
from gsplit.keys import kernels_torch
from gsplit.keys.kernels_numba import mix
from gsplit.sampling.checks import cut_own_edges, raise_status
from gsplit.sampling.drawn import TensorFrontier
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.kernels_numba import DAMAGED, MAX_DEGREE, OK, TOO_MANY, pick_positions
from gsplit.sampling.kernels_torch import draw_from_runs, find_ends, first_seen
from gsplit.sampling.protocol import Fanout, Frontier
from gsplit.store.protocol import GraphStore
from gsplit.store.time_order import order_by_time, stored_times

__all__ = [
    "EdgeTimes",
    "HostTemporalSampler",
    "TemporalSampler",
    "TorchTemporalSampler",
    "open_edge_times",
    "scale_ownership",
    "temporal_sampler",
]


@dataclass(frozen=True)
class EdgeTimes:
    """The time of every in-edge of a range of vertices, whose first is edge ``first_edge``, and their order by time.

    A column whose edges have the times [5, 2, 5] has the order [1, 0, 2].
    """

    time: Ids
    order: npt.NDArray[Any]
    first_edge: int


def open_edge_times(store: GraphStore, graph: Graph, name: str) -> EdgeTimes:
    """Times of the edges of a graph, or of a range of vertices of it. Without a stored order, it is made and held."""
    first_edge = max(0, int(graph.indptr[0]))
    held = slice(first_edge, max(first_edge, int(graph.indptr[-1])))
    time = stored_times(store, name)[held].astype(np.int64, copy=False)
    if f"time_order/{name}" in store.names:
        return EdgeTimes(time, store.stored_array(f"time_order/{name}")[held], first_edge)
    return EdgeTimes(time, order_by_time(graph, time, first_edge), first_edge)


def scale_ownership(ownership: Ownership, num_times: int) -> Ownership:
    """The ranges of (vertex, time) pairs from those of vertices.

    >>> scale_ownership(Ownership((0, 5, 10)), 3).boundaries
    (0, 15, 30)
    """
    return Ownership(tuple(cut * num_times for cut in ownership.boundaries))


def temporal_sampler(
    graph: Graph, original_ids: Ids, device: torch.device, times: EdgeTimes, *, last: bool, edge_ids: bool
) -> "TemporalSampler":
    """The temporal sampler for a device."""
    make = HostTemporalSampler if kernel_for("sample", device) == "numba" else TorchTemporalSampler
    return make(graph, original_ids, device, times, last=last, edge_ids=edge_ids)


class TemporalSampler:
    """See ``protocol.LayerSampler``; ids are (vertex, time) pairs. Set ``times`` before a mini-batch is started.

    ``times``: the S distinct times of the step, ascending, on the device. ``last``: take the latest in-edges.
    """

    excluded: ExcludedEdges | None = None
    find_distinct = staticmethod(first_seen)

    def __init__(
        self,
        graph: Graph,
        original_ids: Ids,
        device: torch.device,
        edges: EdgeTimes,
        *,
        last: bool = False,
        edge_ids: bool = False,
    ) -> None:
        self.first = graph.first_vertex
        self.stop = graph.stop_vertex
        self.edge_ids = edge_ids
        self.times = torch.empty(0, dtype=torch.int64, device=device)
        self._graph = graph
        self._original = original_ids
        self._edges = edges
        self._last = last
        self._files = files_behind(graph.indptr, graph.indices, original_ids, edges.time, edges.order)
        self._held_bytes = 0 if files_behind(edges.order) else edges.order.nbytes

    @property
    def num_bytes(self) -> int:
        """Memory held between mini-batches, the graph apart."""
        return self._held_bytes

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the range."""
        return self._held_bytes

    def start(self, targets: Tensor) -> Frontier:
        """Begin a mini-batch from distinct own (vertex, time) pairs."""
        return _TemporalFrontier(self, targets)

    def draw_layer(self, key: int, ids: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets of the in-edges drawn for every id, their sources as ids, and their positions in the graph."""
        raise NotImplementedError


class _TemporalFrontier(TensorFrontier):
    def __init__(self, sampler: TemporalSampler, targets: Tensor) -> None:
        num_times = sampler.times.numel()
        first = sampler.first * num_times
        stop = sampler.stop * num_times
        super().__init__(targets, first, stop, sampler.times.device, sampler.excluded, sampler.find_distinct)
        self._sampler = sampler
        self._num_times = num_times

    def _name_rows(self) -> Tensor:
        return self._ids // self._num_times  # edges are excluded at every time

    def _name_sources(self, vertices: Tensor, edge_ids: Tensor | None) -> Tensor:
        return vertices // self._num_times

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(fanout, int)  # heterogeneous graphs refuse times
        indptr, sources, places = self._sampler.draw_layer(key, self._ids, fanout)
        return indptr, sources, places if self._sampler.edge_ids else None


@kernel
def _count_until(
    indptr: Ids,
    first: int,
    edge_time: Ids,
    order: npt.NDArray[Any],
    first_edge: int,
    ids: Ids,
    times: Ids,
    fanout: int,
    out_indptr: Ids,
    until: Ids,
) -> int:
    """Find how many in-edges of each id are not later than its time, and how many of them it will draw."""
    out_indptr[0] = 0
    for i in range(ids.size):
        local = ids[i] // times.size - first
        time = times[ids[i] % times.size]
        start = indptr[local] - first_edge
        stop = indptr[local + 1] - first_edge
        if not 0 <= start <= stop <= edge_time.size:
            return DAMAGED
        if stop - start >= MAX_DEGREE:
            return TOO_MANY
        low = 0
        high = stop - start
        while low < high:
            middle = (low + high) >> 1
            position = order[start + middle]
            if not 0 <= position < stop - start:
                return DAMAGED
            if edge_time[start + position] <= time:
                low = middle + 1
            else:
                high = middle
        until[i] = low
        out_indptr[i + 1] = out_indptr[i] + (low if fanout < 0 or low <= fanout else fanout)
    return OK


@kernel
def _draw_until(
    indptr: Ids,
    indices: npt.NDArray[Any],
    num_vertices: int,
    first: int,
    original: Ids,
    order: npt.NDArray[Any],
    first_edge: int,
    key: np.uint64,
    ids: Ids,
    times: Ids,
    last: bool,
    out_indptr: Ids,
    until: Ids,
    sources: Ids,
    places: Ids,
) -> int:
    """Write the sources and positions of all drawn in-edges. ``_count_until`` has checked the same columns."""
    largest = 0
    for i in range(ids.size):
        largest = max(largest, out_indptr[i + 1] - out_indptr[i])
    picks = np.empty(largest, np.uint64)
    for i in range(ids.size):
        vertex = ids[i] // times.size
        slot = ids[i] % times.size
        start = indptr[vertex - first]
        degree = indptr[vertex - first + 1] - start
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        if last or count == until[i]:
            for j in range(count):
                picks[j] = np.uint64(until[i] - count + j)
        else:
            name = np.uint64(original[vertex - first] if original.size else vertex)
            pick_positions(mix(key, mix(name, np.uint64(times[slot]))), until[i], count, picks)
        for j in range(count):
            position = order[start - first_edge + np.int64(picks[j])]
            if not (0 <= position < degree and 0 <= indices[start + position] < num_vertices):
                return DAMAGED
            places[begin + j] = start + position
            sources[begin + j] = np.int64(indices[start + position]) * times.size + slot
    return OK


def _find_distinct(ids: Tensor, num_known: int) -> tuple[Tensor, Tensor]:
    """``first_seen`` by a hash table of the size of the batch."""
    distinct = np.empty(ids.numel(), np.int64)
    places = np.empty_like(distinct)
    count = _number_distinct(ids.numpy(), distinct, places)
    return torch.from_numpy(distinct[:count].copy()), torch.from_numpy(places)


@kernel
def _number_distinct(ids: Ids, distinct: Ids, places: Ids) -> int:
    """Number ids in the order of their first appearance. Returns the number of distinct ones."""
    size = 1 << 4
    while size < 2 * ids.size:
        size *= 2
    table = np.full(size, -1, np.int64)
    count = 0
    for i in range(ids.size):
        at = np.int64(mix(np.uint64(0), np.uint64(ids[i]))) & (size - 1)
        while table[at] >= 0 and distinct[table[at]] != ids[i]:
            at = (at + 1) & (size - 1)
        if table[at] < 0:
            table[at] = count
            distinct[count] = ids[i]
            count += 1
        places[i] = table[at]
    return count


class HostTemporalSampler(TemporalSampler):
    """Draws with compiled kernels, on arrays that are memory-mapped or not."""

    find_distinct = staticmethod(_find_distinct)

    def start(self, targets: Tensor) -> Frontier:
        """See the base. Refuses a store whose files have changed."""
        check_files(self._files)
        return super().start(targets)

    def draw_layer(self, key: int, ids: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
        """See the base."""
        graph = self._graph
        edges = self._edges
        times = self.times.numpy()
        rows = ids.numpy()
        indptr = np.empty(rows.size + 1, np.int64)
        until = np.empty(rows.size, np.int64)
        status = _count_until(
            graph.indptr, self.first, edges.time, edges.order, edges.first_edge, rows, times, fanout, indptr, until
        )
        raise_status(status, graph)
        sources = np.empty(int(indptr[-1]), np.int64)
        places = np.empty_like(sources)
        status = _draw_until(
            graph.indptr,
            graph.indices,
            graph.num_vertices,
            self.first,
            self._original,
            edges.order,
            edges.first_edge,
            np.uint64(key),
            rows,
            times,
            self._last,
            indptr,
            until,
            sources,
            places,
        )
        raise_status(status, graph)
        return torch.from_numpy(indptr), torch.from_numpy(sources), torch.from_numpy(places)


class TorchTemporalSampler(TemporalSampler):
    """Draws with torch operations; the range's own edges are copied to the device in the order of time, and checked."""

    def __init__(
        self, graph: Graph, original_ids: Ids, device: torch.device, edges: EdgeTimes, **options: bool
    ) -> None:
        super().__init__(graph, original_ids, device, edges, **options)
        own = cut_own_edges(graph)
        degrees = np.diff(own.indptr)
        starts = np.repeat(own.indptr[:-1], degrees)
        order: Array = np.asarray(edges.order).astype(np.int64)
        if ((order < 0) | (order >= np.repeat(degrees, degrees))).any():
            raise_status(DAMAGED, graph)
        places = starts + order
        self._places = torch.from_numpy(places + own.first_edge).to(device)
        self._sources = torch.from_numpy(own.indices[places].astype(np.int64)).to(device)
        self._time = torch.from_numpy(np.asarray(edges.time)[places]).to(device)
        self._indptr = torch.from_numpy(own.indptr).to(device)
        names = original_ids if original_ids.size else np.arange(self.first, self.stop)
        self._names = torch.from_numpy(np.array(names)).to(device)
        self._max_degree = int(degrees.max(initial=0))
        self._held_bytes = self._names.nbytes + self._time.nbytes + self._places.nbytes

    def draw_layer(self, key: int, ids: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
        """See the base."""
        num_times = self.times.numel()
        rows = ids // num_times - self.first
        slots = ids % num_times
        times = self.times[slots]
        starts = self._indptr[rows]
        degrees = find_ends(self._time, starts, self._indptr[rows + 1], times, self._max_degree) - starts
        counts = degrees if fanout < 0 else degrees.clamp(max=fanout)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        if self._last:
            starts = starts + degrees - counts
            degrees = counts
        drawn = draw_from_runs(starts, degrees, kernels_torch.mix(self._names[rows], times), key, indptr)
        sources = self._sources[drawn] * num_times + torch.repeat_interleave(slots, counts)
        return indptr, sources, self._places[drawn]
