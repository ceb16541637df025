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
class EdgeChunk:
    """Some edges, source to destination, in any order, with their per-edge values.

    ``num_dropped`` edges were read beside them and left out, because an end of theirs is no vertex.
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
    """A per-vertex array that arrives in pieces; every vertex once."""

    type: ValueType
    chunks: Callable[[], Iterator[RowChunk]]


@dataclass(frozen=True)
class GraphSource:
    """A graph to import. ``num_edges`` is a forecast: it sizes buckets and the progress bar."""

    kind: str
    num_vertices: int
    num_edges: int
    edges: Callable[[], Iterator[EdgeChunk]]
    edge_values: Mapping[str, ValueType] = field(default_factory=dict)
    features: Mapping[str, RowStream] = field(default_factory=dict)
    y: RowStream | None = None
    class_names: tuple[str, ...] = ()
    targets: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    vertex_ids: npt.NDArray[np.int64] | None = None
    vertex_names: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
