"""The graph in memory: in-edges of a range of vertices in compressed sparse column form.

Column ``v`` lists the sources of v's in-edges, because a layer gathers from in-neighbours. The order of a
column is part of the data: by the source's original id, so that a keyed sample depends on nothing else (law 1).
A graph may hold only the vertices ``[first_vertex, stop_vertex)``; sources are ids of the whole graph.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Graph"]


@dataclass(frozen=True, slots=True)
class Graph:
    """CSC: the sources of vertex v are ``indices[indptr[v - first] : indptr[v - first + 1]]``.

    ``indptr`` need not begin at 0: a restricted graph shares ``indices`` with the one it was cut from.

    >>> graph = Graph(np.array([0, 2, 3]), np.array([0, 1, 0], np.int32), num_vertices=2)
    >>> graph.sources(0).tolist(), graph.in_degrees().tolist()
    ([0, 1], [2, 1])
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[Any]
    num_vertices: int
    first_vertex: int = 0

    @property
    def stop_vertex(self) -> int:
        """One past the last vertex held."""
        return self.first_vertex + self.indptr.size - 1

    @property
    def num_edges(self) -> int:
        """In-edges of the vertices held."""
        return int(self.indptr[-1]) - int(self.indptr[0])

    def restrict(self, first_vertex: int, stop_vertex: int) -> "Graph":
        """The graph of a smaller range of vertices, over the same arrays."""
        if not self.first_vertex <= first_vertex <= stop_vertex <= self.stop_vertex:
            got = f"{first_vertex}..{stop_vertex}"
            raise IndexError(f"range: expected within {self.first_vertex}..{self.stop_vertex} (got {got})")
        rows = slice(first_vertex - self.first_vertex, stop_vertex - self.first_vertex + 1)
        return Graph(self.indptr[rows], self.indices, self.num_vertices, first_vertex)

    def in_degrees(self) -> npt.NDArray[np.int64]:
        """Number of in-edges of every vertex held."""
        return np.diff(self.indptr)

    def sources(self, vertex: int) -> npt.NDArray[Any]:
        """The in-neighbours of one vertex, in the graph's order."""
        if not self.first_vertex <= vertex < self.stop_vertex:
            raise IndexError(f"vertex: expected {self.first_vertex}..{self.stop_vertex - 1} (got {vertex})")
        start, stop = (int(p) for p in self.indptr[vertex - self.first_vertex : vertex - self.first_vertex + 2])
        return self.indices[max(start, 0) : max(stop, 0)]  # a damaged indptr gives a wrong slice, never a foreign one

    def describe_damage(self) -> str | None:
        """The first offsets, or else the source ids, that are out of range; None if none are. Reads everything."""
        starts, stops = self.indptr[:-1], self.indptr[1:]
        wrong = np.flatnonzero((starts < 0) | (starts > stops) | (stops > self.indices.size))
        if wrong.size:
            row = int(wrong[0])
            return (
                f"offsets {starts[row]}..{stops[row]} at vertex {self.first_vertex + row}, of {self.indices.size} edges"
            )
        sources = self.indices[self.indptr[0] : self.indptr[-1]]
        if sources.size and not 0 <= int(sources.min()) <= int(sources.max()) < self.num_vertices:
            return f"ids {sources.min()}..{sources.max()}, of {self.num_vertices} vertices"
        return None
