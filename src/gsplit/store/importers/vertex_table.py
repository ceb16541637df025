"""The vertex table of an import: features, labels and targets, each by the vertices that its ids stand for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.files import Array
from gsplit.store.importers.arrow import Table, explained, list_rows, load_arrow, number_column
from gsplit.store.importers.labels import Labels, as_labels
from gsplit.store.importers.vertex_ids import VertexIds
from gsplit.store.source import CHUNK_EDGES, RowChunk, RowStream, ValueType, VertexRange, dtype_name

__all__ = ["TableColumns", "unused_columns", "vertex_features", "vertex_labels", "vertex_targets"]

_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class TableColumns:
    """Which column means what."""

    src: str = "src"
    dst: str = "dst"
    edge_values: Sequence[str] = ()
    id: str = "id"
    label: str = "y"
    split: str = "split"
    feature_list: str = "x"
    features: Sequence[str] = field(default_factory=tuple)


def _placed(
    table: Table, columns: TableColumns, ids: VertexIds, names: list[str], held: VertexRange | None = None
) -> Iterator[tuple[Array, Any]]:
    """Batches of some columns with the vertices of their rows; without row groups that have none of ``held``."""
    near = ids.bounds(columns.id, held) if held else None
    for _, batch in table.numbered_batches(
        list(dict.fromkeys([columns.id, *names])), CHUNK_EDGES // 4, [near] if near else []
    ):
        vertices = ids.lookup(str(table.path), batch[columns.id])
        assert (vertices >= 0).all(), f"{table.path} changed while it was read"
        yield vertices, batch


def vertex_features(table: Table, columns: TableColumns, ids: VertexIds) -> dict[str, RowStream]:
    """Features of the vertex table: a column of lists, or number columns that were named."""
    name = columns.feature_list
    if columns.features:
        kind = ValueType("float32", (len(columns.features),))

        def from_columns(held: VertexRange | None = None) -> Iterator[RowChunk]:
            for vertices, batch in _placed(table, columns, ids, list(columns.features), held):
                parts = [number_column(f"{table.path}: {c}", batch[c]) for c in columns.features]
                yield RowChunk(vertices, np.stack(parts, axis=1))

        return {"x": RowStream(kind, from_columns, from_columns)}
    if name not in table.schema.names:
        return {}

    def from_lists(held: VertexRange | None = None) -> Iterator[RowChunk]:
        for vertices, batch in _placed(table, columns, ids, [name], held):
            yield RowChunk(vertices, list_rows(f"{table.path}: {name}", batch[name]))

    first = next(from_lists(), None)
    if first is None:
        return {}
    dtype = dtype_name(first.rows.dtype) if first.rows.dtype.kind == "f" else "float32"
    assert dtype is not None
    return {"x": RowStream(ValueType(dtype, first.rows.shape[1:]), from_lists, from_lists)}


def vertex_labels(table: Table, columns: TableColumns, ids: VertexIds) -> Labels | None:
    """Labels of the vertex table, None without any."""
    arrow, name = load_arrow(), columns.label
    if name not in table.schema.names:
        return None
    kind, where = table.schema.field(name).type, f"{table.path}: {name}"
    whole = arrow.types.is_integer(kind) or arrow.types.is_boolean(kind)

    def chunks() -> Iterator[RowChunk]:
        for vertices, batch in _placed(table, columns, ids, [name]):
            column = batch[name]
            if whole:
                with explained(where, "use whole numbers below 2**63"):
                    column = column.cast(arrow.int64()).fill_null(-1)
            yield RowChunk(vertices, number_column(where, column))

    if arrow.types.is_boolean(kind):
        return Labels(RowStream(ValueType("int64"), chunks), ("y: bool imported as classes 0 and 1",))
    return as_labels(RowStream(ValueType("int64" if whole else "float32"), chunks))


def vertex_targets(table: Table, columns: TableColumns, ids: VertexIds) -> dict[str, npt.NDArray[np.int64]]:
    """Targets by name, as the column of splits says."""
    if columns.split not in table.schema.names:
        return {}
    arrow = load_arrow()
    found: dict[str, list[Array]] = {}
    for vertices, batch in _placed(table, columns, ids, [columns.split]):
        with explained(f"{table.path}: {columns.split}", "write the words in UTF-8"):
            words = arrow.compute.unique(batch[columns.split]).to_pylist()
        for word in words:
            if not word:
                continue
            if word not in _SPLITS:
                expected, fix = f"one of {', '.join(_SPLITS)} or nothing", "rename these values"
                raise InputError(explain(f"{table.path}: {columns.split}", expected, repr(word)[:80], fix))
            here = arrow.compute.equal(batch[columns.split], word).fill_null(False)
            found.setdefault(_SPLITS[word], []).append(vertices[here.to_numpy(zero_copy_only=False)])
    return {name: np.sort(np.concatenate(parts)) for name, parts in found.items()}


def unused_columns(table: Table | None, columns: TableColumns) -> tuple[str, ...]:
    """A note on the columns of the vertex table that are not imported."""
    if table is None:
        return ()
    used = {columns.id, columns.label, columns.split, *(columns.features or [columns.feature_list])}
    unused = [name for name in table.schema.names if name not in used]
    return (f"not imported: {', '.join(unused)}",) if unused else ()
