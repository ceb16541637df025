"""A layer sampler made of one function: which in-edges of some vertices are drawn.

What is drawn is all that samplers differ in. Rows, their order, and the vertices of other ranks are the same for all,
and kept here, so that a sampler of one's own is the draw and nothing else.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.sampling.kernels_torch import first_seen, place_foreign
from gsplit.sampling.protocol import SampledLayer, SampledRange

__all__ = ["DrawnFrontier", "DrawnSampler", "EdgeDraw"]

EdgeDraw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""``draw(ids, key, fanout)``: how many in-edges of each vertex are drawn, and the edges, vertex after vertex, as
positions in ``graph.indices``. Equal for equal keys, fanouts and vertices, whatever else is asked for in the call."""


class DrawnSampler:
    """See ``LayerSampler``. Draws the in-edges of a range of vertices by a function of the program's own.

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

    def __init__(self, part: SampledRange, draw: EdgeDraw) -> None:
        self._part, self._draw = part, draw

    def start(self, targets: Tensor) -> "DrawnFrontier":
        """Begin a mini-batch from distinct own vertices."""
        return DrawnFrontier(self._part, self._draw, targets)


class DrawnFrontier:
    """See ``Frontier``."""

    def __init__(self, part: SampledRange, draw: EdgeDraw, targets: Tensor) -> None:
        self._part, self._draw, self._ids = part, draw, targets

    @property
    def num_rows(self) -> int:
        return self._ids.numel()

    def ids(self, num_rows: int) -> Tensor:
        return self._ids[:num_rows]

    def sample_layer(self, key: int, fanout: int) -> SampledLayer:
        graph, ids = self._part.graph, self._ids
        counts, edges = self._draw(ids, key, fanout)
        self._check_draw(ids, counts, edges)
        vertices = torch.from_numpy(graph.indices[edges.cpu().numpy()]).to(ids)
        own = (vertices >= graph.first_vertex) & (vertices < graph.stop_vertex)
        foreign_ids, slots = first_seen(vertices[~own], 0)
        sources = torch.empty_like(vertices)
        sources[own], sources[~own] = self.locate(vertices[own]), -1 - slots
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return SampledLayer(indptr, sources, foreign_ids, edges)

    def locate(self, ids: Tensor) -> Tensor:
        known = self.num_rows
        self._ids, places = first_seen(torch.cat([self._ids, ids]), known)
        return places[known:]

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        return place_foreign(drawn.sources, foreign_rows)

    def close(self) -> None:
        self._ids = self._ids[:0]

    def _check_draw(self, ids: Tensor, counts: Tensor, edges: Tensor) -> None:
        """Refuse edges that are not in-edges of the vertices they were drawn for."""
        fix, graph = "see gsplit.extending.EdgeDraw", self._part.graph
        if not counts.dtype == edges.dtype == torch.int64 or counts.shape != ids.shape or edges.dim() != 1:
            expected = f"{ids.numel()} counts and a row of edges, both int64"
            got = f"{counts.dtype} {list(counts.shape)} and {edges.dtype} {list(edges.shape)}"
            raise InputError(explain("draw", expected, got, fix))
        if bool((counts < 0).any()) or int(counts.sum()) != edges.numel():
            got = f"{edges.numel()} edges for counts that sum to {int(counts.sum())}"
            raise InputError(explain("draw", "as many edges as the counts say, none below 0", got, fix))
        rows = torch.repeat_interleave(ids.cpu() - graph.first_vertex, counts.cpu()).numpy()
        places, indptr = edges.cpu().numpy(), graph.indptr
        if bool(((places < indptr[rows]) | (places >= indptr[rows + 1])).any()):
            expected = "edges of each vertex, from indptr[v - first_vertex] to below indptr[v - first_vertex + 1]"
            raise InputError(explain("draw", expected, "an edge of another vertex", fix))
