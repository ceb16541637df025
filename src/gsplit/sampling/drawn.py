"""Frontiers whose rows are a tensor, and a sampler made of one function: which in-edges of some vertices are drawn.

What is drawn is all that samplers differ in. Rows, their order and the vertices of other ranks are the same for all and
kept by ``TensorFrontier``. ``DrawnSampler`` is how a program gives the loader a sampler of its own. It checks what the
function draws, because rows and ids become addresses in kernels and in messages to other ranks. Whether a draw depends
on the key and the vertex alone (law 1) cannot be checked here; ``gsplit.verify`` does.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from gsplit.device.devices import copy_to_device
from gsplit.errors import InputError, explain
from gsplit.sampling.checks import check_own, raise_status
from gsplit.sampling.excluded import ExcludedEdges, keep_included
from gsplit.sampling.kernels_numba import DAMAGED
from gsplit.sampling.kernels_torch import first_seen, place_foreign
from gsplit.sampling.protocol import Fanout, LayerSampler, SampledLayer, SampledRange, SamplerFactory

__all__ = ["DrawnSampler", "EdgeDraw", "TensorFrontier", "require_drawn"]

_ONE_AT_A_TIME = threading.Lock()
"""Functions of programs need not be made for threads: checks may draw while a loader draws ahead."""

EdgeDraw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""``draw(ids, key, fanout)``: how many in-edges of each vertex are drawn, and the edges, vertex after vertex, as
positions in ``graph.indices``. Equal for equal keys, fanouts and vertices, whatever else is asked for in the call."""


class TensorFrontier:
    """See ``protocol.Frontier``: the rows of a mini-batch as a tensor of ids. Subclasses draw.

    Own vertices are those from ``first`` to below ``stop``. ``device``: where rows are. ``find_distinct``:
    ``first_seen``, or a faster version.
    """

    def __init__(
        self,
        targets: Tensor,
        first: int,
        stop: int,
        device: torch.device,
        excluded: ExcludedEdges | None = None,
        find_distinct: Callable[[Tensor, int], tuple[Tensor, Tensor]] = first_seen,
    ) -> None:
        self._first = first
        self._stop = stop
        self._device = device
        self._find_distinct = find_distinct
        self._ids = self._take(targets)
        self._excluded = excluded

    @property
    def num_rows(self) -> int:
        return self._ids.numel()

    def ids(self, num_rows: int) -> Tensor:
        return self._ids[:num_rows]  # rows are appended to a new tensor, so this one does not change

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        indptr, vertices, edge_ids = self._draw_included(key, fanout)
        own = (vertices >= self._first) & (vertices < self._stop)
        foreign_ids, slots = self._find_distinct(vertices[~own], 0)
        sources = torch.empty_like(vertices)
        sources[own] = self._append(vertices[own])
        sources[~own] = -1 - slots
        return SampledLayer(indptr, sources, foreign_ids.cpu(), edge_ids)

    def locate(self, ids: Tensor) -> Tensor:
        return self._append(self._take(ids))

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        return place_foreign(drawn.sources, copy_to_device(foreign_rows, self._device))

    def close(self) -> None:
        self._ids = self._ids[:0]

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        """Offsets of the in-edges drawn for every row, their source vertices and, if wanted, the edges' positions."""
        raise NotImplementedError

    def _name_sources(self, vertices: Tensor, edge_ids: Tensor | None) -> Tensor:
        """The names of the sources of drawn edges among those of excluded edges."""
        return vertices

    def _name_rows(self) -> Tensor:
        """The names of the rows among the destinations of excluded edges."""
        return self._ids

    def _draw_included(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        """What ``_draw`` draws, without excluded edges."""
        indptr, vertices, edge_ids = self._draw(key, fanout)
        if self._excluded is None:
            return indptr, vertices, edge_ids
        names = self._name_sources(vertices, edge_ids)
        indptr, kept = keep_included(self._name_rows(), indptr, names, self._excluded)
        return indptr, vertices[kept], None if edge_ids is None else edge_ids[kept]

    def _take(self, ids: Tensor) -> Tensor:
        """Own vertices, on the device. Those that are there already come from a sampler and are not checked."""
        if ids.device.type == "cpu":
            check_own(ids.numpy(), self._first, self._stop)
        return copy_to_device(ids, self._device)

    def _append(self, ids: Tensor) -> Tensor:
        known = self.num_rows
        self._ids, places = self._find_distinct(torch.cat([self._ids, ids]), known)
        return places[known:]


class DrawnSampler:
    """Draws the in-edges of a range of vertices by a function of the program's own, and checks what it draws.

    >>> import numpy as np
    >>> from gsplit.graph.graph import Graph
    >>> graph = Graph(np.array([0, 2, 3]), np.array([0, 1, 0], np.int32), num_vertices=2)
    >>> part = SampledRange(graph, np.empty(0, np.int64), torch.device("cpu"))
    >>> first = torch.from_numpy(graph.indptr)
    >>> sampler = DrawnSampler(part, lambda ids, key, fanout: (torch.ones_like(ids), first[ids]))
    >>> frontier = sampler.start(torch.tensor([1]))
    >>> frontier.sample_layer(0, 1).sources.tolist(), frontier.ids(2).tolist()
    ([1], [1, 0])
    """

    num_bytes = num_range_bytes = 0
    excluded: ExcludedEdges | None = None

    def __init__(self, part: SampledRange, draw: EdgeDraw) -> None:
        self._part = part
        self._draw = draw

    def start(self, targets: Tensor) -> "TensorFrontier":
        """Begin a mini-batch from distinct own vertices."""
        return _DrawnFrontier(self._part, self._draw, targets, self.excluded)


class _DrawnFrontier(TensorFrontier):
    def __init__(self, part: SampledRange, draw: EdgeDraw, targets: Tensor, excluded: ExcludedEdges | None) -> None:
        super().__init__(targets, part.graph.first_vertex, part.graph.stop_vertex, part.device, excluded)
        self._part = part
        self._draw_edges = draw

    def _draw(self, key: int, fanout: Fanout) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(fanout, int)  # heterogeneous graphs refuse samplers of the program's own
        graph, ids = self._part.graph, self._ids
        with _ONE_AT_A_TIME:
            drawn = self._draw_edges(ids, key, fanout)
        counts, edges = _checked_pair(drawn, ids)
        rows = torch.repeat_interleave(ids.cpu() - graph.first_vertex, counts.cpu()).numpy()
        places = edges.cpu().numpy()
        indptr = graph.indptr
        wrong = (places < indptr[rows]) | (places >= indptr[rows + 1])
        if wrong.any():
            row = int(rows[wrong][0])
            expected = f"edges of vertex {graph.first_vertex + row} in {indptr[row]}..{indptr[row + 1] - 1}"
            raise _wrong_draw(expected, int(places[wrong][0]))
        sources = graph.indices[places]
        if sources.size and not 0 <= int(sources.min()) <= int(sources.max()) < graph.num_vertices:
            raise_status(DAMAGED, graph)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return offsets, torch.from_numpy(sources).to(ids), edges if self._part.edge_ids else None


def _wrong_draw(expected: str, got: object) -> InputError:
    return InputError(explain("draw", expected, got, "see gsplit.extending.EdgeDraw"))


def _checked_pair(drawn: object, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Refuse what is not a count for every vertex and as many edges."""
    expected = f"{ids.numel()} counts and a row of edges, both int64 on {ids.device}"
    if not isinstance(drawn, tuple) or len(drawn) != 2 or not all(isinstance(part, Tensor) for part in drawn):
        raise _wrong_draw(expected, drawn)
    counts, edges = drawn
    of_ids = all(part.dtype == torch.int64 and part.device.type == ids.device.type for part in drawn)
    if not of_ids or counts.shape != ids.shape or edges.dim() != 1:
        shapes = [f"{part.dtype} {list(part.shape)} on {part.device}" for part in drawn]
        raise _wrong_draw(expected, " and ".join(shapes))
    if bool((counts < 0).any()) or int(counts.sum()) != edges.numel():
        got = f"{edges.numel()} edges for counts that sum to {int(counts.sum())}"
        raise _wrong_draw("as many edges as the sum of the counts, none below 0", got)
    return counts, edges


def require_drawn(sampler: SamplerFactory) -> SamplerFactory:
    """A program's function that makes samplers, with its result checked."""

    def make(part: SampledRange) -> LayerSampler:
        with _ONE_AT_A_TIME:
            made = sampler(part)
        if not isinstance(made, DrawnSampler):
            fix = "return DrawnSampler(part, draw), see gsplit.extending"
            got = f"one that returns {type(made).__name__}"
            raise InputError(explain("sampler", "a function that returns a DrawnSampler", got, fix))
        return made

    return make
