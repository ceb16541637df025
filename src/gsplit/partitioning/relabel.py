"""Renumbering a store by parts, so that order carries meaning.

Vertices of a part become contiguous, so the owner of a vertex follows from a table of boundaries; inside a part they
are sorted by how often presampling loaded them, hottest first, so a cache is a prefix. In a heterogeneous graph a part
is ordered by vertex type first, so the vertices of a type in a part are contiguous. Everything else moves with them:
in-edges with their values, features, labels, names, targets. A vertex's neighbours and the target lists keep their
order, which is that of the original ids; so keyed samples stay the same (law 1).

New arrays are written front to back, in pieces; memory is that of the vertices.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress, silent
from gsplit.store.manifest import Manifest, PartStatistics, ProvenanceStep, index_type, role_of
from gsplit.store.reader import Store
from gsplit.store.source import row_slices
from gsplit.store.writer import StoreWriter

__all__ = ["order_vertices", "places_of", "run_pieces", "write_renumbered"]

_PIECE_BYTES = 32 << 20


def order_vertices(
    parts: npt.NDArray[np.int32], hotness: npt.NDArray[np.uint32], types: npt.NDArray[np.int64] | None = None
) -> Ids:
    """Old ids in the new order: by part, then by type if there are types, then hottest first, then by old id.

    >>> order_vertices(np.array([1, 0, 1, 0]), np.array([5, 1, 9, 1], np.uint32)).tolist()
    [1, 3, 2, 0]
    >>> order_vertices(np.array([1, 0, 1, 0]), np.array([5, 1, 9, 1], np.uint32), np.array([0, 1, 1, 0])).tolist()
    [3, 1, 0, 2]
    """
    by_part = (parts,) if types is None else (types, parts)
    return np.lexsort((-hotness.astype(np.int64), *by_part))


def write_renumbered(
    writer: StoreWriter,
    store: Store,
    parts: npt.NDArray[np.int32],
    hotness: npt.NDArray[np.uint32],
    statistics: PartStatistics,
    step: ProvenanceStep,
    progress: Progress = silent,
) -> None:
    """Write ``store`` in the order of its parts, and commit. ``store`` is whole and has its original numbering."""
    types = store.types.of_host(np.arange(store.num_vertices)) if store.types else None
    order = order_vertices(parts, hotness, types)
    new_id = np.empty_like(order)
    new_id[order] = np.arange(order.size)
    _move_columns(writer, store, order, new_id, progress)
    for name in store.names:
        role = role_of(name)
        if role.rows == "vertex":
            _move_rows(writer, store, name, _rows_in_order(store, order, role.vertex_type), progress)
        elif role.is_whole:  # pairs, by original ids
            writer.copy(name, store.dtype(name), store.stored_array(name), progress)
        elif name.startswith("name_offsets"):
            _move_names(writer, store, name, _rows_in_order(store, order, role.vertex_type), progress)
    for name in store.manifest.names("targets"):
        writer.write(f"targets/{name}", "int64", new_id[store.stored_array(f"targets/{name}")])
    writer.write("original_ids", "int64", order)
    writer.write("internal_ids", index_type(order.size), new_id)
    writer.write("hotness", "int64", hotness[order])
    sizes = np.bincount(parts, minlength=len(statistics.loads))
    ranges = np.empty(0, np.int64)
    if store.types is not None and types is not None:
        num_types = store.types.num_types
        ranges = np.bincount(parts * np.int64(num_types) + types, minlength=sizes.size * num_types)
    progress("flush to disk", 0, None)
    whole = store.manifest
    writer.commit(
        Manifest(
            num_vertices=whole.num_vertices,
            num_edges=whole.num_edges,
            vertex_range=whole.vertex_range,
            part_boundaries=[0, *np.cumsum(sizes).tolist()],
            type_boundaries=[0, *np.cumsum(ranges).tolist()] if ranges.size else [],
            **whole.label_metadata,
            arrays=writer.finish_arrays(),
            statistics=whole.statistics,  # of the degrees: an order does not change them
            part_statistics=statistics,
            provenance=[*whole.provenance, step],
        )
    )


def _rows_in_order(store: Store, order: Ids, vertex_type: str | None) -> Ids:
    """The rows of an array in the new order: all vertices, or those of the type that the array belongs to."""
    if vertex_type is None:
        return order
    assert store.types is not None
    first, stop = store.types.ranges(vertex_type)[0]  # of a store in its original numbering
    return order[(order >= first) & (order < stop)] - first


def run_pieces(lengths: Ids, element_bytes: int) -> Iterator[slice]:
    """Cut a row of runs of elements into pieces of bounded size, at least one run each."""
    ends = np.cumsum(lengths)
    most = max(1, _PIECE_BYTES // element_bytes)
    first = 0
    while first < lengths.size:
        done = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield slice(first, stop)
        first = stop


@kernel
def _places(starts: npt.NDArray[Any], lengths: npt.NDArray[Any], places: npt.NDArray[Any]) -> None:
    """Where the elements of runs stand."""
    at = 0
    for run in range(starts.size):
        for i in range(lengths[run]):
            places[at] = starts[run] + i
            at += 1


def places_of(offsets: Array, runs: Ids) -> Ids:
    """Where the elements of some runs stand, run after run."""
    starts = np.asarray(offsets[runs])
    lengths = offsets[runs + 1] - starts
    places = np.empty(int(lengths.sum()), np.int64)
    _places(starts, lengths, places)
    return places


def _move_columns(writer: StoreWriter, store: Store, order: Ids, new_id: Ids, progress: Progress) -> None:
    """In-edges with their values, column after column of the new order."""
    offsets = store.stored_array("indptr")
    names = [name for name in store.names if role_of(name).rows == "edge"]
    lengths = np.diff(offsets)[order]
    writer.write("indptr", "int64", np.concatenate([[0], np.cumsum(lengths)]))
    appenders = {name: writer.append(name, store.dtype(name), store.stored_array(name).shape[1:]) for name in names}
    done = 0
    for piece in run_pieces(lengths, 8 + max(store.stored_array(name)[:1].nbytes for name in names)):
        places = places_of(offsets, order[piece])
        for name, appender in appenders.items():
            values = store.stored_array(name)[places]
            appender.append(new_id[values] if name == "indices" else values)
        done += places.size
        progress("move edges", done, store.num_edges)


def _move_rows(writer: StoreWriter, store: Store, name: str, order: Ids, progress: Progress) -> None:
    rows = store.stored_array(name)
    appender = writer.append(name, store.dtype(name), rows.shape[1:])
    for piece in row_slices(order.size, rows[:1].nbytes):
        appender.append(rows[order[piece]])
        progress(f"move {name}", piece.stop, order.size)


def _move_names(writer: StoreWriter, store: Store, name: str, order: Ids, progress: Progress) -> None:
    """String ids. ``name`` is that of their offsets."""
    offsets = store.stored_array(name)
    name_of_text = name.replace("name_offsets", "name_bytes")
    text = store.stored_array(name_of_text)
    lengths = np.diff(offsets)[order]
    writer.write(name, "int64", np.concatenate([[0], np.cumsum(lengths)]))
    appender = writer.append(name_of_text, "uint8")
    for piece in run_pieces(lengths, 9):
        appender.append(text[places_of(offsets, order[piece])])
        progress("move names", piece.stop, order.size)
