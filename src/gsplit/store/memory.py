"""A graph in memory with the face of an opened store, for data that has not been written to disk."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.graph import Graph
from gsplit.store.files import Array, raw_bytes

__all__ = ["MemoryStore", "renumbered_store"]


@dataclass(frozen=True)
class MemoryStore:
    """See ``reader.Store``: the same names, with arrays instead of memory maps."""

    graph: Graph
    part_boundaries: list[int]
    arrays: dict[str, Array]
    dtypes: dict[str, str]
    unused: tuple[str, ...] = ()

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole graph."""
        return self.graph.num_vertices

    @property
    def vertex_range(self) -> tuple[int, int]:
        """All vertices."""
        return 0, self.num_vertices

    @property
    def part_loads(self) -> None:
        """Not known."""

    @property
    def fingerprint(self) -> str:
        """The graph in short, to compare between ranks."""
        digest = hashlib.sha256()
        for array in (self.graph.indptr, self.graph.indices, self.original_ids()):
            digest.update(raw_bytes(array))
        return digest.hexdigest()

    @property
    def names(self) -> list[str]:
        """Names of all arrays."""
        return sorted(self.arrays)

    def stored_array(self, name: str) -> Array:
        """One array by name."""
        if name not in self.arrays:
            raise InputError(explain("graph", f"one of {', '.join(self.names)}", name, "use one of these names"))
        return self.arrays[name]

    def stored_targets(self, name: str) -> tuple[Array, None, int]:
        """A target list, all of it."""
        targets = self.stored_array(f"targets/{name}")
        return targets, None, targets.size

    def dtype(self, name: str) -> str:
        """The element type of an array, by its logical name."""
        self.stored_array(name)
        return self.dtypes[name]

    def original_ids(self, first: int = 0, stop: int | None = None) -> Array:
        """The ids that vertices (all, or a range of them) had before they were renumbered."""
        return self.arrays["original_ids"][first:stop]


def renumbered_store(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
    vertex_arrays: dict[str, tuple[Array, str]],
    targets: dict[str, npt.NDArray[np.int64]],
) -> MemoryStore:
    """A graph renumbered by parts: vertices of a part are contiguous, in their original order.

    ``parts[v]`` is the part of original vertex v. Neighbours are ordered by original id, as in every store.
    """
    num_vertices = parts.size
    original = np.argsort(parts, kind="stable")
    internal = np.empty_like(original)
    internal[original] = np.arange(num_vertices)
    order = np.lexsort([src, internal[dst]])
    indptr = np.concatenate([[0], np.cumsum(np.bincount(internal[dst], minlength=num_vertices))]).astype(np.int64)
    counts = np.bincount(parts, minlength=int(parts.max(initial=0)) + 1)
    arrays = {"original_ids": original}
    arrays |= {name: array[original] for name, (array, _) in vertex_arrays.items()}
    arrays |= {f"targets/{name}": internal[np.sort(ids)] for name, ids in targets.items()}
    graph = Graph(indptr, internal[src[order]], num_vertices)
    dtypes = {name: dtype for name, (_, dtype) in vertex_arrays.items()}
    return MemoryStore(graph, [0, *np.cumsum(counts).tolist()], arrays, dtypes)
