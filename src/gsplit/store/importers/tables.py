"""Edge and vertex tables in Parquet or CSV, with ids that are integers or strings.

The edge table has a source and a destination column and, if named, columns of per-edge values. The vertex
table, if there is one, lists every vertex: an id column, optionally a label, a split (train, val, test) and
features: a column of lists named ``x``, or number columns given by name. Tables are read in several passes
and never held; the ids are, where they have to be mapped.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import IdBounds, Table, load_arrow, number_column
from gsplit.store.importers.table_columns import TableColumns, is_pattern, match_columns
from gsplit.store.importers.vertex_ids import (
    BATCH_IDS,
    IdMode,
    UnknownIds,
    VertexIds,
    check_spelling,
    collect_ids,
    dense_ids,
    widened_alike,
)
from gsplit.store.importers.vertex_table import (
    drop_unlabelled,
    named_columns,
    table_notes,
    vertex_features,
    vertex_labels,
    vertex_targets,
)
from gsplit.store.source import (
    CHUNK_EDGES,
    EdgeChunk,
    GraphSource,
    RowStream,
    ValueType,
    VertexRange,
    dtype_name,
    plain_name,
)

__all__ = ["tables_source"]


def tables_source(
    edges: str | Path,
    vertices: str | Path | None = None,
    *,
    columns: TableColumns | None = None,
    ids: IdMode | str = IdMode.AUTO,
    num_vertices: int | None = None,
    unknown_ids: UnknownIds | str = UnknownIds.REFUSE,
    delimiter: str | None = None,
) -> GraphSource:
    """The graph in an edge table and, if given, a vertex table.

    ``ids``: ``dense`` takes integers as vertices 0 .. n-1; ``map`` numbers the distinct ids; ``names`` reads CSV ids
    as text and maps them. ``auto`` maps, except integers without a vertex table whose largest is below twice the
    number of edges: then they are taken as they are. ``unknown_ids``: edges whose ends are not all vertices, by the
    vertex table or ``num_vertices``, are refused, or dropped and counted. ``delimiter``: of CSV files, by default what
    separates the names in their first line.
    """
    columns = columns or TableColumns()
    ids, unknown = IdMode(ids), UnknownIds(unknown_ids)
    if unknown == UnknownIds.DROP and vertices is None and num_vertices is None:
        fix = "give a vertex table, or leave --unknown-ids out: every id of an edge is a vertex"
        raise InputError(explain("unknown_ids", "a vertex table or num_vertices for drop", "neither", fix))
    text = ids == IdMode.NAMES
    edge_table = Table(
        edges,
        delimiter=delimiter,
        text_columns=(columns.src, columns.dst) if text else (),
        number_columns=columns.edge_values,
    )
    edge_table.require({columns.src: "--src", columns.dst: "--dst"})
    edge_table.require(dict.fromkeys(columns.edge_values, "--edge-column"))
    vertex_table = None
    if vertices is None:
        _require_no_vertex_columns(columns)
    else:
        columns = _matched(columns, vertices, delimiter)
        vertex_table = Table(
            vertices,
            delimiter=delimiter,
            text_columns=(columns.split, columns.id) if text else (columns.split,),
            number_columns=columns.features,
        )
        _require_vertex_columns(vertex_table, columns)
    if ids in (IdMode.AUTO, IdMode.MAP):
        check_spelling(edge_table, [columns.src, columns.dst], delimiter)
        if vertex_table is not None:
            check_spelling(vertex_table, [columns.id], delimiter)
    vertex_ids = _vertex_ids(edge_table, vertex_table, columns, ids, num_vertices)
    features: dict[str, RowStream] = {}
    targets: dict[str, npt.NDArray[np.int64]] = {}
    labels, notes = None, tuple[str, ...]()
    if vertex_table is not None:
        features = vertex_features(vertex_table, columns, vertex_ids)
        labels = vertex_labels(vertex_table, columns, vertex_ids)
        targets = vertex_targets(vertex_table, columns, vertex_ids)
        notes = labels.notes if labels else ()
        notes += drop_unlabelled(targets, labels, vertex_ids.num_vertices) + table_notes(vertex_table, columns)
    return GraphSource(
        kind="tables",
        num_vertices=vertex_ids.num_vertices,
        num_edges=edge_table.forecast_rows(),
        edges=lambda: _edge_chunks(edge_table, columns, vertex_ids, unknown),
        edges_near=lambda held, both: _edge_chunks(edge_table, columns, vertex_ids, unknown, held, both_ends=both),
        edge_values={name: _value_type(edge_table, name) for name in columns.edge_values},
        features=features,
        feature_columns=named_columns(columns) if features else (),
        y=labels.rows if labels else None,
        class_names=labels.class_names if labels else (),
        targets=targets,
        vertex_ids=vertex_ids.as_integers(),
        vertex_names=vertex_ids.as_names(),
        settings={
            "edges": plain_name(Path(edges)),
            "vertices": plain_name(Path(vertices)) if vertices else None,
            "ids": ids,
            "unknown_ids": unknown,
            "delimiter": delimiter,
            "columns": _used_columns(columns, vertex_table),
        },
        notes=notes,
        identity=" ".join(table.identity() for table in (edge_table, vertex_table) if table),
        modified=max(table.modified() for table in (edge_table, vertex_table) if table),
    )


def _used_columns(columns: TableColumns, vertices: Table | None) -> dict[str, object]:
    """Which column is taken for what, for the provenance, and for other hosts to be compared with."""
    edges: dict[str, object] = {"src": columns.src, "dst": columns.dst, "edge_values": list(columns.edge_values)}
    if vertices is None:
        return edges
    names = {"label": columns.label, "split": columns.split, "feature_list": columns.feature_list}
    found = {what: name for what, name in names.items() if name in vertices.schema.names}
    features = {"features": list(columns.features)} if columns.features else {}
    return edges | {"id": columns.id, "label_type": columns.label_type} | found | features


def _matched(columns: TableColumns, vertices: str | Path, delimiter: str | None) -> TableColumns:
    """The same with the features that patterns stand for."""
    if not any(map(is_pattern, columns.features)):
        return columns
    others = {columns.id, columns.label, columns.split, columns.feature_list}
    names = [name for name in Table(vertices, delimiter=delimiter).schema.names if name not in others]
    for pattern in columns.features:
        if not match_columns([pattern], names):
            got, fix = f"columns {', '.join(names) or 'none'}", "correct or leave out this --feature-column"
            raise InputError(explain(vertices, f"a column that matches {pattern}", got, fix))
    return replace(columns, features=tuple(match_columns(columns.features, names)))


def _require_no_vertex_columns(columns: TableColumns) -> None:
    """Without a vertex table, options that speak of it do nothing."""
    usual = TableColumns()
    asked = [
        option
        for option, name, default in (
            ("--id-column", columns.id, usual.id),
            ("--label-column", columns.label, usual.label),
            ("--label-type", columns.label_type, usual.label_type),
            ("--split-column", columns.split, usual.split),
            ("--list-column", columns.feature_list, usual.feature_list),
            ("--feature-column", tuple(columns.features), usual.features),
        )
        if name != default
    ]
    if asked:
        fix = "give the table of vertices with --vertices, or leave these options out"
        raise InputError(explain(", ".join(asked), "a vertex table", "none", fix))


def _require_vertex_columns(table: Table, columns: TableColumns) -> None:
    """The ids, and every column that was asked for, must be there."""
    usual = TableColumns()
    asked = {columns.id: "--id-column", **dict.fromkeys(columns.features, "--feature-column")}
    asked |= {columns.label: "--label-column"} if columns.label != usual.label else {}
    asked |= {columns.split: "--split-column"} if columns.split != usual.split else {}
    asked |= {columns.feature_list: "--list-column"} if columns.feature_list != usual.feature_list else {}
    table.require(asked)


def _vertex_ids(
    edges: Table, vertices: Table | None, columns: TableColumns, ids: IdMode, num_vertices: int | None
) -> VertexIds:
    arrow = load_arrow()
    if num_vertices is not None and (vertices is not None or ids in (IdMode.MAP, IdMode.NAMES)):
        fix = "leave it out: the vertices are those of the vertex table, or the ids that are mapped"
        raise InputError(explain("num_vertices", "none with a vertex table or mapped ids", num_vertices, fix))
    kinds = [edges.schema.field(name).type for name in (columns.src, columns.dst)]
    integers = all(arrow.types.is_integer(kind) for kind in kinds)
    if ids == IdMode.DENSE and not integers:
        raise InputError(explain("ids", "integer ids for --ids dense", kinds[0], "use --ids map"))
    if vertices is not None:
        where = f"{vertices.path}: {columns.id}"
        found = collect_ids(where, _columns(vertices, [columns.id]), unique=True)
        if found.num_vertices == 0:
            fix = "add the vertices, or leave --vertices out: every id of an edge is a vertex"
            raise InputError(explain(vertices.path, "a row per vertex", "no rows", fix))
        if ids == IdMode.DENSE and found.values is not None:
            got = f"{found.num_vertices} ids from {found.values[0]} to {found.values[-1]}"
            raise InputError(explain(where, "ids 0 .. n-1 for --ids dense", got, "use --ids map"))
        return found
    if num_vertices is not None and integers and ids in (IdMode.AUTO, IdMode.DENSE):
        return dense_ids(num_vertices)
    if integers and ids in (IdMode.AUTO, IdMode.DENSE):
        low, high, count = _extent(edges, columns)
        if low >= 0 and (ids == IdMode.DENSE or high < 2 * count):
            return dense_ids(high + 1)
        if ids == IdMode.DENSE:
            raise InputError(explain(str(edges.path), "ids from 0 for --ids dense", low, "use --ids map"))
    return collect_ids(str(edges.path), _columns(edges, [columns.src, columns.dst]), unique=False)


def _columns(table: Table, names: list[str]) -> Iterator[Any]:
    for batch in table.batches(names):
        yield from batch.columns


def _extent(edges: Table, columns: TableColumns) -> tuple[int, int, int]:
    """Smallest and largest id, and the number of edges: from the file's own statistics, or in one pass."""
    arrow = load_arrow()
    known = [edges.extent(column) for column in (columns.src, columns.dst)]
    if None not in known:
        ends = [end for pair in known if pair is not None for end in pair]
        return min(ends), max(ends), edges.forecast_rows()
    low, high, count = 0, -1, 0
    for batch in edges.batches([columns.src, columns.dst]):
        count += batch.num_rows
        for column in batch.columns:
            found = arrow.compute.min_max(column).as_py()
            if found["min"] is not None:
                low, high = min(low, found["min"]), max(high, found["max"])
    return low, high, count


def _edge_chunks(
    table: Table,
    columns: TableColumns,
    ids: VertexIds,
    unknown: UnknownIds,
    held: VertexRange | None = None,
    *,
    both_ends: bool = False,
) -> Iterator[EdgeChunk]:
    names, where = list(dict.fromkeys([columns.src, columns.dst, *columns.edge_values])), str(table.path)
    rows = CHUNK_EDGES if ids.values is None else BATCH_IDS // 2
    for first_row, batch in table.numbered_batches(names, rows, _bounds(columns, ids, unknown, held, both_ends)):
        ends = widened_alike(where, [batch[columns.src], batch[columns.dst]])
        both = ids.lookup(where, load_arrow().concat_arrays(ends))
        src, dst = both[: batch.num_rows], both[batch.num_rows :]
        values = {name: number_column(f"{where}: {name}", batch[name]) for name in columns.edge_values}
        lost = np.flatnonzero((src < 0) | (dst < 0))
        if lost.size and unknown == UnknownIds.REFUSE:
            first = int(lost[0])
            example = ends[0 if src[first] < 0 else 1][first].as_py()
            stop = first_row + batch.num_rows - 1
            got = (
                f"{example!r} in row {first_row + first}; edges with such ids in rows {first_row}..{stop}: {lost.size}"
            )
            fix = "add these ids to the vertex table, or leave such edges out with --unknown-ids drop"
            raise InputError(explain(where, f"ids among the {ids.num_vertices} vertices", got, fix))
        num_dropped = lost.size if held is None else held.count_edges_into(dst[lost])
        if lost.size:
            src, dst = np.delete(src, lost), np.delete(dst, lost)
            values = {name: np.delete(value, lost) for name, value in values.items()}
        yield EdgeChunk(src, dst, values, num_dropped)


def _bounds(
    columns: TableColumns, ids: VertexIds, unknown: UnknownIds, held: VertexRange | None, both_ends: bool
) -> list[IdBounds]:
    """Which row groups a range needs: none of these may hold for a group to be left out; nothing for all groups."""
    if held is None or (unknown == UnknownIds.DROP and held.counts_strays and ids.values is not None):
        return []  # an id that is no vertex may stand anywhere between those that are
    found = [ids.bounds(column, held) for column in ((columns.dst, columns.src) if both_ends else (columns.dst,))]
    return [bounds for bounds in found if bounds] if all(found) else []


def _value_type(table: Table, name: str) -> ValueType:
    try:  # not to_pandas_dtype: older versions of pyarrow ask for pandas there
        empty = load_arrow().array([], table.schema.field(name).type)
        dtype = dtype_name(empty.to_numpy(zero_copy_only=False).dtype)
    except (TypeError, NotImplementedError):
        dtype = None
    if dtype is None:
        got = table.schema.field(name).type
        expected = "a column of numbers: bool, int8 to int64, uint8, float16 to float64"
        raise InputError(explain(f"{table.path}: {name}", expected, got, "cast the column to one of these"))
    return ValueType(dtype)
