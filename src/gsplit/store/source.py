"""The input of ``build``: a graph that an importer reads in pieces, when asked to."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.store.files import DTYPES

__all__ = [
    "CHUNK_EDGES",
    "EdgeChunk",
    "EdgePieces",
    "EdgeRules",
    "GraphSource",
    "PairList",
    "RowChunk",
    "RowStream",
    "ValueType",
    "VertexRange",
    "check_edge_index",
    "dtype_name",
    "plain_name",
    "stream_rows",
    "row_slices",
]

CHUNK_EDGES = 1 << 20
"""Edges that an importer reads at a time."""
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class ValueType:
    """Element type and shape of one row of an array."""

    dtype: str
    row_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class VertexRange:
    """The vertices ``first .. stop - 1``, which are imported here with their in-edges.

    ``counts_dangling_edges``: whether edges whose destination is not a vertex are counted here. Of several hosts, one
    counts them.
    """

    first: int
    stop: int
    counts_dangling_edges: bool = True

    @property
    def size(self) -> int:
        return self.stop - self.first

    def holds(self, ids: Array) -> npt.NDArray[np.bool_]:
        """Mask of the ids that lie in the range."""
        return (ids >= self.first) & (ids < self.stop)

    def count_edges_into(self, destinations: Array) -> int:
        """Number of edges that this range counts, by their destinations. -1 is not a vertex."""
        num_held = int(np.count_nonzero(self.holds(destinations)))
        return num_held + (int(np.count_nonzero(destinations < 0)) if self.counts_dangling_edges else 0)

    def take(self, chunk: "RowChunk") -> "RowChunk":
        """The rows of the vertices in the range, numbered from ``first``.

        >>> VertexRange(2, 4).take(RowChunk(slice(1, 6), np.arange(5)))
        RowChunk(vertices=slice(0, 2, None), rows=array([1, 2]))
        """
        if isinstance(chunk.vertices, slice):
            begin = chunk.vertices.start
            first = min(max(self.first, begin), chunk.vertices.stop)
            stop = min(max(self.stop, begin), chunk.vertices.stop)
            return RowChunk(slice(first - self.first, stop - self.first), chunk.rows[first - begin : stop - begin])
        kept = self.holds(chunk.vertices)
        return RowChunk(chunk.vertices[kept] - self.first, chunk.rows[kept])


@dataclass(frozen=True)
class EdgeChunk:
    """Some edges, source to destination, in any order, with their per-edge values.

    ``num_dropped`` more edges were read and left out because an endpoint is not a vertex. For a range: those that it
    counts. ``relation`` is the number of the edges' type in a heterogeneous graph.
    """

    src: Array
    dst: Array
    values: Mapping[str, Array] = field(default_factory=dict)
    num_dropped: int = 0
    relation: int = 0


@dataclass(frozen=True)
class RowChunk:
    """Rows of a per-vertex array and the vertices they belong to."""

    vertices: slice | Ids
    rows: Array


@dataclass(frozen=True)
class RowStream:
    """A per-vertex array in pieces, every vertex once.

    ``chunks_near`` may skip pieces without vertices of a range, if that is known without reading them.
    """

    type: ValueType
    chunks: Callable[[], Iterator[RowChunk]]
    chunks_near: Callable[[VertexRange], Iterator[RowChunk]] | None = None

    def near(self, held: VertexRange) -> Iterator[RowChunk]:
        """Chunks that include all rows of a range."""
        return self.chunks_near(held) if self.chunks_near else self.chunks()


@dataclass(frozen=True)
class PairList:
    """Vertex pairs [n, 2], source and destination, optionally with labels [n] and negative destinations [n, K].

    All ids are those of the source, 0 .. n-1.
    """

    pairs: Ids
    labels: Array | None = None
    negatives: Ids | None = None

    def arrays(self, name: str) -> dict[str, Array]:
        """The arrays of this list in a store, by name."""
        found = {f"pairs/{name}": self.pairs, f"pair_labels/{name}": self.labels}
        found |= {f"pair_negatives/{name}": self.negatives}
        return {array_name: array for array_name, array in found.items() if array is not None}


@dataclass(frozen=True)
class EdgePieces:
    """Edges in pieces that can be read one without the other, such as the row groups of Parquet files.

    ``count_near(held, both_ends)``: how many may have edges into a range, or with ``both_ends`` also out of it, as far
    as is known without reading them.
    """

    count: int
    read: Callable[[range], Iterator[EdgeChunk]]
    count_near: Callable[[VertexRange, bool], int]


@dataclass(frozen=True)
class GraphSource:
    """A graph to import. ``num_edges`` is an estimate for the number of buckets and the progress bar.

    ``edges_near(held, both_ends)`` may skip edges without an endpoint in a range, if that is known without reading
    them. Only destinations count as endpoints unless ``both_ends``, which reverse edges need. ``edge_pieces``: the same
    edges for several hosts that each read some of them. ``identity`` identifies the input without reading it (names and
    sizes of files); ``modified`` is the time of its last change.

    ``values_of_types``: the names of ``edge_values`` that each edge type has, without those of its import.

    A heterogeneous graph has ``edge_types`` and ``vertices``: for every vertex type a source without edges. The ids in
    its edges are fused: those of a type follow those of the types before it (``graph.types``).
    """

    kind: str
    num_vertices: int
    num_edges: int
    edges: Callable[[], Iterator[EdgeChunk]]
    edges_near: Callable[[VertexRange, bool], Iterator[EdgeChunk]] | None = None
    edge_pieces: EdgePieces | None = None
    edge_values: Mapping[str, ValueType] = field(default_factory=dict)
    features: Mapping[str, RowStream] = field(default_factory=dict)
    feature_columns: tuple[str, ...] = ()
    y: RowStream | None = None
    class_names: tuple[str, ...] = ()
    targets: Mapping[str, Ids] = field(default_factory=dict)
    pairs: Mapping[str, PairList] = field(default_factory=dict)
    vertex_ids: Ids | None = None
    vertex_names: tuple[Ids, npt.NDArray[np.uint8]] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    identity: str = ""
    modified: float = 0.0
    vertices: "Mapping[str, GraphSource]" = field(default_factory=dict)
    edge_types: tuple[EdgeType, ...] = ()
    values_of_types: tuple[tuple[str, ...], ...] = ()

    @property
    def whole(self) -> VertexRange:
        return VertexRange(0, self.num_vertices)

    def near(self, held: VertexRange, *, both_ends: bool) -> Iterator[EdgeChunk]:
        """Chunks that include all edges into a range, with ``both_ends`` also those out of it."""
        if self.edges_near is None or held == self.whole:
            return self.edges()
        return self.edges_near(held, both_ends)


@dataclass(frozen=True)
class EdgeRules:
    """Changes to the edges during import. ``symmetrise`` adds every reverse edge and drops duplicates."""

    symmetrise: bool = False
    drop_self_loops: bool = False
    drop_duplicates: bool = False


def check_edge_index(where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Refuse an edge index that is not a 2 x E matrix of integers."""
    if len(shape) != 2 or shape[0] != 2 or dtype.kind not in "iu":
        raise InputError(explain(where, "integers of shape [2, E]", f"{dtype} {list(shape)}", "give it in PyG's form"))


def plain_name(path: Path) -> str:
    """A file's name for the provenance, with other bytes than UTF-8 replaced."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The store's name for a numpy dtype, or None for unsupported ones."""
    return dtype.name if dtype.name in DTYPES and dtype.name != "bfloat16" else None


def row_slices(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Cut a range of rows into pieces of bounded size.

    >>> list(row_slices(5, 8 << 20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def stream_rows(array: Array, dtype: str) -> RowStream:
    """An array in memory or a memory map as a ``RowStream``."""

    def chunks() -> Iterator[RowChunk]:
        for piece in row_slices(array.shape[0], array[:1].nbytes):
            yield RowChunk(piece, array[piece])

    return RowStream(ValueType(dtype, array.shape[1:]), chunks)
