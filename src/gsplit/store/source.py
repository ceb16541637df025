"""What an importer hands to ``build``: a graph that can be read in pieces, and nothing read yet."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.files import DTYPES, Array

__all__ = [
    "CHUNK_EDGES",
    "EdgeChunk",
    "EdgeRules",
    "GraphSource",
    "RowChunk",
    "RowStream",
    "ValueType",
    "VertexRange",
    "check_edge_index",
    "dtype_name",
    "plain_name",
    "rows_of",
    "row_slices",
]

CHUNK_EDGES = 1 << 20
"""Edges an importer reads at a time: large enough to forget the call, small enough to forget the memory."""
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class ValueType:
    """Element type and shape of one row of an array."""

    dtype: str
    row_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class VertexRange:
    """The vertices ``first .. stop - 1`` that are imported here, with their in-edges; of a whole store, all.

    ``counts_strays``: whether edges whose destination is no vertex are counted here; of several hosts, one does.
    """

    first: int
    stop: int
    counts_strays: bool = True

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.stop - self.first

    def holds(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of some vertices it has."""
        return (ids >= self.first) & (ids < self.stop)

    def count_edges_into(self, destinations: npt.NDArray[Any]) -> int:
        """How many of some edges it counts; a destination of -1 is no vertex."""
        held = int(np.count_nonzero(self.holds(destinations)))
        return held + (int(np.count_nonzero(destinations < 0)) if self.counts_strays else 0)

    def take(self, chunk: "RowChunk") -> "RowChunk":
        """The rows of its own vertices, which are counted from its first.

        >>> VertexRange(2, 4).take(RowChunk(slice(1, 6), np.arange(5)))
        RowChunk(vertices=slice(0, 2, None), rows=array([1, 2]))
        """
        if isinstance(chunk.vertices, slice):
            begin = chunk.vertices.start
            first, stop = (min(max(end, begin), chunk.vertices.stop) for end in (self.first, self.stop))
            return RowChunk(slice(first - self.first, stop - self.first), chunk.rows[first - begin : stop - begin])
        kept = self.holds(chunk.vertices)
        return RowChunk(chunk.vertices[kept] - self.first, chunk.rows[kept])


@dataclass(frozen=True)
class EdgeChunk:
    """Some edges, source to destination, in any order, with their per-edge values.

    ``num_dropped`` edges were read beside them and left out, because an end of theirs is no vertex; of a range, those
    that it counts.
    """

    src: npt.NDArray[Any]
    dst: npt.NDArray[Any]
    values: Mapping[str, Array] = field(default_factory=dict)
    num_dropped: int = 0


@dataclass(frozen=True)
class RowChunk:
    """RowStream of a per-vertex array and the vertices they belong to."""

    vertices: slice | npt.NDArray[np.int64]
    rows: Array


@dataclass(frozen=True)
class RowStream:
    """A per-vertex array that arrives in pieces; every vertex once.

    ``chunks_near`` leaves out pieces without vertices of a range, as far as that can be known without reading them.
    """

    type: ValueType
    chunks: Callable[[], Iterator[RowChunk]]
    chunks_near: Callable[[VertexRange], Iterator[RowChunk]] | None = None

    def near(self, held: VertexRange) -> Iterator[RowChunk]:
        """The rows of a range at least."""
        return self.chunks_near(held) if self.chunks_near else self.chunks()


@dataclass(frozen=True)
class GraphSource:
    """A graph to import. ``num_edges`` is a forecast: it sizes buckets and the progress bar.

    ``edges_near`` leaves out edges without an end in a range, as far as that can be known without reading them; the
    second argument says whether sources count as ends, as they do where reverse edges are added. ``identity`` differs
    for other inputs, as far as that can be known without reading them; ``modified`` is when an input was last written.
    """

    kind: str
    num_vertices: int
    num_edges: int
    edges: Callable[[], Iterator[EdgeChunk]]
    edges_near: Callable[[VertexRange, bool], Iterator[EdgeChunk]] | None = None
    edge_values: Mapping[str, ValueType] = field(default_factory=dict)
    features: Mapping[str, RowStream] = field(default_factory=dict)
    feature_columns: tuple[str, ...] = ()
    y: RowStream | None = None
    class_names: tuple[str, ...] = ()
    targets: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    vertex_ids: npt.NDArray[np.int64] | None = None
    vertex_names: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    identity: str = ""
    modified: float = 0.0

    @property
    def whole(self) -> VertexRange:
        """All vertices."""
        return VertexRange(0, self.num_vertices)

    def near(self, held: VertexRange, *, both_ends: bool) -> Iterator[EdgeChunk]:
        """The edges into a range at least, with ``both_ends`` those out of it too."""
        if self.edges_near is None or held == self.whole:
            return self.edges()
        return self.edges_near(held, both_ends)


@dataclass(frozen=True)
class EdgeRules:
    """What to do to the edges on the way in. ``symmetrise`` adds every reverse edge and drops duplicates."""

    symmetrise: bool = False
    drop_self_loops: bool = False
    drop_duplicates: bool = False


def check_edge_index(where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Refuse what is not a 2 x E matrix of whole numbers, sources above destinations."""
    if len(shape) != 2 or shape[0] != 2 or dtype.kind not in "iu":
        got, fix = f"{dtype} {list(shape)}", "give it in PyG's form"
        raise InputError(explain(where, "integers of shape [2, E]", got, fix))


def plain_name(path: Path) -> str:
    """A file's name for the provenance, also where it is not UTF-8."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The store's name for a numpy dtype, or None where it has none."""
    return dtype.name if dtype.name in DTYPES and dtype.name != "bfloat16" else None


def row_slices(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Cut a range of rows into pieces of bounded size.

    >>> list(row_slices(5, 8 << 20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def rows_of(array: Array, dtype: str) -> RowStream:
    """An array at hand, memory-mapped or not, as ``RowStream``."""

    def chunks() -> Iterator[RowChunk]:
        for piece in row_slices(array.shape[0], array[:1].nbytes):
            yield RowChunk(piece, array[piece])

    return RowStream(ValueType(dtype, array.shape[1:]), chunks)
