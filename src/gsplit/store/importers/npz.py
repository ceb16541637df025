"""numpy ``.npz`` graphs: ``edge_index`` (2 x E, sources above destinations) and optional arrays.

Optional: ``x`` (or ``x_indptr``, ``x_indices``, ``x_data``, ``x_shape``: features as CSR, made dense), ``y``,
``num_nodes``, ``train_idx``, ``val_idx``, ``test_idx``, ``edge_weight``, ``edge_attr``. The notes of the source name
all other members, which are not imported.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.store.importers.labels import as_labels
from gsplit.store.importers.npz_file import NpzMember, npz_members
from gsplit.store.source import (
    CHUNK_BYTES,
    CHUNK_EDGES,
    EdgeChunk,
    GraphSource,
    RowChunk,
    RowStream,
    ValueType,
    check_edge_index,
    dtype_name,
    plain_name,
    row_slices,
)

__all__ = ["edge_index_chunks", "feature_rows", "npz_source"]

_TARGETS = {"train_idx": "train", "val_idx": "val", "test_idx": "test"}
_SPARSE_X = ("x_indptr", "x_indices", "x_data", "x_shape")
_EDGE_VALUES = ("edge_weight", "edge_attr")


def npz_source(path: str | Path) -> GraphSource:
    """The graph in a ``.npz`` file."""
    path = Path(path)
    members = npz_members(path)
    if "edge_index" not in members:
        got = ", ".join(members) or "an empty archive"
        raise InputError(explain(path, "a member edge_index", got, "save the edges under that name"))
    edges = members["edge_index"]
    check_edge_index(edges.where, edges.dtype, edges.shape)
    values = {name: members[name] for name in _EDGE_VALUES if name in members}
    features = {}
    if "x" in members:
        features["x"] = feature_rows(members["x"])
    elif all(name in members for name in _SPARSE_X):
        features["x"] = _sparse_rows(members)
    used = {"edge_index", "x", "y", "num_nodes", *_TARGETS, *_SPARSE_X, *_EDGE_VALUES}
    unused = sorted(set(members) - used)
    labels = as_labels(_label_rows(members["y"])) if "y" in members else None
    notes = (f"not imported: {', '.join(unused)}",) if unused else ()
    return GraphSource(
        kind="npz",
        num_vertices=_num_vertices(members),
        num_edges=edges.shape[1],
        edges=lambda: edge_index_chunks(edges, values),
        edge_values={name: _value_type(member, edges.shape[1]) for name, member in values.items()},
        features=features,
        y=labels.rows if labels else None,
        targets={name: members[key].integers() for key, name in _TARGETS.items() if key in members},
        settings={"input": plain_name(path)},
        notes=(*labels.notes, *notes) if labels else notes,
    )


def edge_index_chunks(edges: NpzMember, values: dict[str, NpzMember]) -> Iterator[EdgeChunk]:
    """The columns of ``edge_index`` in order, with their per-edge values."""
    count = edges.shape[1]
    row_bytes = 16 + sum(m.dtype.itemsize * prod(m.shape[1:]) for m in values.values())
    step = max(1, min(CHUNK_EDGES, CHUNK_BYTES // row_bytes))
    ends: Iterator[tuple[Array, Array]]
    if edges.fortran_order:  # source and destination alternate
        ends = ((pair[0::2], pair[1::2]) for pair in edges.elements(0, 2 * count, 2 * step))
    else:
        ends = zip(edges.elements(0, count, step), edges.elements(count, count, step), strict=True)
    columns = {name: _value_chunks(member, step) for name, member in values.items()}
    for src, dst in ends:
        yield EdgeChunk(src, dst, {name: next(column) for name, column in columns.items()})


def _value_type(member: NpzMember, num_edges: int) -> ValueType:
    dtype = dtype_name(member.dtype)
    if dtype is None or not 1 <= len(member.shape) <= 2 or member.shape[0] != num_edges:
        got = f"{member.dtype} {list(member.shape)}"
        expected = f"numbers of shape [{num_edges}] or [{num_edges}, D]"
        raise InputError(explain(member.where, expected, got, "correct it"))
    return ValueType(dtype, member.shape[1:])


def _value_chunks(member: NpzMember, step: int) -> Iterator[Array]:
    member.require_rows()
    width = prod(member.shape[1:])
    if not width:  # values without columns: nothing to read
        for first in range(0, member.shape[0], step):
            yield np.empty((min(step, member.shape[0] - first), *member.shape[1:]), member.dtype)
        return
    for flat in member.elements(0, member.shape[0] * width, step * width):
        yield flat.reshape(-1, *member.shape[1:])


def feature_rows(member: NpzMember) -> RowStream:
    """Features. Floats keep their type; other numbers become float32."""
    if len(member.shape) != 2 or member.dtype.kind not in "fiub":
        got = f"{member.dtype} {list(member.shape)}"
        raise InputError(explain(member.where, "numbers of shape [N, D]", got, "save features as a matrix"))
    name = dtype_name(member.dtype) if member.dtype.kind == "f" else "float32"
    if name is None:
        fix = "save it as float32"
        raise InputError(explain(member.where, "float16, float32 or float64", member.dtype, fix))
    return member.rows(name)


def _label_rows(member: NpzMember) -> RowStream:
    """Labels. Integers become int64; other numbers keep their type."""
    if member.dtype.kind in "iu" and member.dtype != np.uint64:
        return member.rows("int64")
    name = dtype_name(member.dtype)
    if name is None:
        raise InputError(
            explain(member.where, "numbers", member.dtype, "encode labels as integers, -1 for missing ones")
        )
    return member.rows(name)


def _sparse_rows(members: dict[str, NpzMember]) -> RowStream:
    """The rows of a CSR matrix, made dense in pieces. The CSR arrays are kept in memory."""
    num_rows, width = _sparse_shape(members)

    def chunks() -> Iterator[RowChunk]:
        indptr = members["x_indptr"].read().astype(np.int64)
        columns = members["x_indices"].read()
        data = members["x_data"].read()
        is_valid = indptr.shape == (num_rows + 1,) and (np.diff(indptr) >= 0).all() and indptr[-1] == columns.size
        is_valid &= columns.size == data.size
        is_valid &= not columns.size or 0 <= int(columns.min()) <= int(columns.max()) < width
        if not is_valid:
            where = members["x_indptr"].where
            widest = int(columns.max(initial=-1))
            got = f"{indptr.size} offsets, {columns.size} columns up to {widest}, {data.size} values"
            raise InputError(explain(where, f"a CSR matrix of {num_rows} x {width}", got, "save it again"))
        for piece in row_slices(num_rows, 4 * width):
            first = int(indptr[piece.start])
            last = int(indptr[piece.stop])
            dense = np.zeros((piece.stop - piece.start, width), np.float32)
            rows = np.repeat(np.arange(dense.shape[0]), np.diff(indptr[piece.start : piece.stop + 1]))
            dense[rows, columns[first:last].astype(np.int64)] = data[first:last]
            yield RowChunk(piece, dense)

    return RowStream(ValueType("float32", (width,)), chunks)


def _sparse_shape(members: dict[str, NpzMember]) -> tuple[int, int]:
    shape = members["x_shape"].integers()
    if shape.size != 2:
        raise InputError(explain(members["x_shape"].where, "two numbers", shape.size, "save the shape of the matrix"))
    return int(shape[0]), int(shape[1])


def _num_vertices(members: dict[str, NpzMember]) -> int:
    """From ``num_nodes``, or the rows of ``x`` or ``y``, or the largest id in a first pass over the edges."""
    if "num_nodes" in members:
        counts = members["num_nodes"].integers()
        if counts.size != 1:
            raise InputError(explain(members["num_nodes"].where, "one number", counts.size, "save one number"))
        return int(counts[0])
    if "x_shape" in members:
        return int(_sparse_shape(members)[0])
    for name in ("x", "y"):
        if name in members and members[name].shape:
            return members[name].shape[0]
    largest: list[Ids] = [np.array([-1])]
    edges = members["edge_index"]
    largest += [part.max(keepdims=True).astype(np.int64) for part in edges.elements(0, 2 * edges.shape[1], CHUNK_EDGES)]
    return int(np.concatenate(largest).max()) + 1
