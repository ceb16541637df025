"""The graph in memory: the in-edges of a range of vertices in compressed sparse column form.

Column ``v`` lists the sources of v's in-edges, because a layer aggregates from in-neighbours. The sources of a column
are ordered by their original ids, so that a keyed sample depends on nothing else (law 1). A graph may have only the
columns of the vertices ``first_vertex .. stop_vertex - 1``. Sources are ids of the whole graph.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Graph"]


@dataclass(frozen=True, slots=True)
class Graph:
    """CSC: the sources of vertex v are ``indices[indptr[v - first] : indptr[v - first + 1]]``.

    ``indptr`` need not start at 0: a restricted graph shares ``indices`` with the graph that it is a part of.

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
        """One past the last vertex of the range."""
        return self.first_vertex + self.indptr.size - 1

    @property
    def num_edges(self) -> int:
        """The number of in-edges of the vertices of the range."""
        return int(self.indptr[-1]) - int(self.indptr[0])

    def restrict(self, first_vertex: int, stop_vertex: int) -> "Graph":
        """The graph of a smaller range of vertices, over the same arrays."""
        if not self.first_vertex <= first_vertex <= stop_vertex <= self.stop_vertex:
            got = f"{first_vertex}..{stop_vertex}"
            raise IndexError(f"range: expected within {self.first_vertex}..{self.stop_vertex} (got {got})")
        rows = slice(first_vertex - self.first_vertex, stop_vertex - self.first_vertex + 1)
        return Graph(self.indptr[rows], self.indices, self.num_vertices, first_vertex)

    def in_degrees(self) -> npt.NDArray[np.int64]:
        """The number of in-edges of every vertex of the range."""
        return np.diff(self.indptr)

    def sources(self, vertex: int) -> npt.NDArray[Any]:
        """The in-neighbours of one vertex, in the graph's order."""
        if not self.first_vertex <= vertex < self.stop_vertex:
            raise IndexError(f"vertex: expected {self.first_vertex}..{self.stop_vertex - 1} (got {vertex})")
        start, stop = self.indptr[vertex - self.first_vertex : vertex - self.first_vertex + 2].tolist()
        return self.indices[max(start, 0) : max(stop, 0)]  # a negative, damaged offset must not count from the end

    def describe_damage(self) -> str | None:
        """The first offsets, or else the source ids, out of range; None if the graph is valid. Reads all arrays."""
        starts = self.indptr[:-1]
        stops = self.indptr[1:]
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
