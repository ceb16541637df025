"""Edge and vertex tables in Parquet or CSV, with ids that are integers or strings.

The edge table has a source and a destination column and, optionally, columns of per-edge values. The optional vertex
table lists every vertex: an id column and, optionally, a label, a split (train, val, test) and features: a column of
lists named ``x``, or number columns given by name. Tables are read in several passes and not kept in memory. Ids are,
if they have to be mapped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import (
    IdBounds,
    TableColumns,
    TableFile,
    flat_lists,
    is_pattern,
    load_arrow,
    match_columns,
    number_column,
)
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
from gsplit.store.importers.vertex_table import VertexData, read_vertices
from gsplit.store.source import (
    CHUNK_EDGES,
    EdgeChunk,
    EdgePieces,
    GraphSource,
    PairList,
    ValueType,
    VertexRange,
    dtype_name,
    plain_name,
)

__all__ = ["edge_chunks", "open_edge_table", "open_vertex_table", "tables_source", "vertex_table_ids"]

_PAIR_LABEL = "label"
_PAIR_NEGATIVES = "negatives"


def tables_source(
    edges: str | Path,
    vertices: str | Path | None = None,
    *,
    columns: TableColumns | None = None,
    ids: IdMode | str = IdMode.AUTO,
    num_vertices: int | None = None,
    unknown_ids: UnknownIds | str = UnknownIds.REFUSE,
    delimiter: str | None = None,
    pairs: Mapping[str, str | Path] | None = None,
) -> GraphSource:
    """The graph in an edge table and, if given, a vertex table.

    ``ids``: ``dense`` uses integers as vertices 0 .. n-1; ``map`` numbers the distinct ids; ``names`` reads CSV ids
    as text and maps them. ``auto`` maps, unless ids are integers, there is no vertex table, and the largest id is below
    twice the number of edges: then it uses them unchanged. ``unknown_ids``: edges with an endpoint that is not a vertex
    (by the vertex table or ``num_vertices``) are refused, or dropped and counted. ``delimiter`` of CSV files: the
    separator of the names in their first line by default. ``pairs`` are tables of vertex pairs by name, with the source
    and destination columns of the edge table and, optionally, a column ``label`` of numbers and (Parquet) a column
    ``negatives`` of lists of ids. They are read into memory.
    """
    ids = IdMode(ids)
    unknown = UnknownIds(unknown_ids)
    if unknown == UnknownIds.DROP and vertices is None and num_vertices is None:
        fix = "give a vertex table, or leave --unknown-ids out: every id of an edge is a vertex"
        got = "no vertex table and no num_vertices"
        raise InputError(explain("unknown_ids", "a vertex table or num_vertices for drop", got, fix))
    edge_table, vertex_table, columns = _open_tables(edges, vertices, columns or TableColumns(), ids, delimiter)
    vertex_ids = _vertex_ids(edge_table, vertex_table, columns, ids, num_vertices)
    found = read_vertices(vertex_table, columns, vertex_ids) if vertex_table else VertexData()
    pair_tables = {name: _open_pairs(file, columns, ids, delimiter) for name, file in (pairs or {}).items()}
    tables = [edge_table, *([vertex_table] if vertex_table else []), *pair_tables.values()]
    return GraphSource(
        kind="tables",
        num_vertices=vertex_ids.num_vertices,
        num_edges=edge_table.forecast_rows(),
        edges=lambda: edge_chunks(edge_table, columns, (vertex_ids, vertex_ids), unknown),
        edges_near=lambda held, both: edge_chunks(
            edge_table, columns, (vertex_ids, vertex_ids), unknown, held, both_ends=both
        ),
        edge_pieces=_edge_pieces(edge_table, columns, vertex_ids, unknown),
        edge_values={name: _value_type(edge_table, name) for name in columns.edge_values},
        features=found.features,
        feature_columns=found.feature_columns,
        y=found.labels.rows if found.labels else None,
        class_names=found.labels.class_names if found.labels else (),
        targets=found.targets,
        pairs={name: _read_pairs(table, columns, vertex_ids) for name, table in pair_tables.items()},
        vertex_ids=vertex_ids.as_integers(),
        vertex_names=vertex_ids.as_names(),
        settings={
            "edges": plain_name(Path(edges)),
            "vertices": plain_name(Path(vertices)) if vertices else None,
            "ids": ids,
            "unknown_ids": unknown,
            "delimiter": delimiter,
            "columns": _used_columns(columns, vertex_table),
            **({"pairs": {name: plain_name(Path(file)) for name, file in pairs.items()}} if pairs else {}),
        },
        notes=found.notes,
        identity=" ".join(table.identity() for table in tables),
        modified=max(table.modified() for table in tables),
    )


def _edge_pieces(table: TableFile, columns: TableColumns, ids: VertexIds, unknown: UnknownIds) -> EdgePieces | None:
    if table.is_csv:
        return None
    return EdgePieces(
        count=table.num_row_groups(),
        read=lambda pieces: edge_chunks(table, columns, (ids, ids), unknown, row_groups=pieces),
        count_near=lambda held, both: table.count_near(_bounds(columns, ids, unknown, held, both)),
    )


def _open_tables(
    edges: str | Path, vertices: str | Path | None, columns: TableColumns, ids: IdMode, delimiter: str | None
) -> tuple[TableFile, TableFile | None, TableColumns]:
    """The tables, which have all required columns, and ``columns`` with the patterns resolved."""
    edge_table = open_edge_table(edges, columns, ids, delimiter)
    if vertices is None:
        _require_no_vertex_columns(columns)
        return edge_table, None, columns
    return edge_table, *open_vertex_table(vertices, columns, ids, delimiter)


def open_edge_table(edges: str | Path, columns: TableColumns, ids: IdMode, delimiter: str | None) -> TableFile:
    """A table of edges, which has all required columns."""
    table = TableFile(
        edges,
        delimiter=delimiter,
        text_columns=(columns.src, columns.dst) if ids == IdMode.NAMES else (),
        number_columns=columns.edge_values,
    )
    table.require({columns.src: "--src", columns.dst: "--dst"})
    table.require(dict.fromkeys(columns.edge_values, "--edge-column"))
    if ids in (IdMode.AUTO, IdMode.MAP):
        check_spelling(table, [columns.src, columns.dst], delimiter)
    return table


def open_vertex_table(
    vertices: str | Path, columns: TableColumns, ids: IdMode, delimiter: str | None
) -> tuple[TableFile, TableColumns]:
    """A table of vertices, which has all required columns, and ``columns`` with the patterns resolved."""
    columns = _matched(columns, vertices, delimiter)
    table = TableFile(
        vertices,
        delimiter=delimiter,
        text_columns=(columns.split, columns.id) if ids == IdMode.NAMES else (columns.split,),
        number_columns=columns.features,
    )
    _require_vertex_columns(table, columns)
    if ids in (IdMode.AUTO, IdMode.MAP):
        check_spelling(table, [columns.id], delimiter)
    return table, columns


def _open_pairs(file: str | Path, columns: TableColumns, ids: IdMode, delimiter: str | None) -> TableFile:
    ends = (columns.src, columns.dst)
    table = TableFile(file, delimiter=delimiter, text_columns=ends if ids == IdMode.NAMES else ())
    table.require({columns.src: "--src", columns.dst: "--dst"})
    if ids in (IdMode.AUTO, IdMode.MAP):
        check_spelling(table, ends, delimiter)
    return table


def _read_pairs(table: TableFile, columns: TableColumns, ids: VertexIds) -> PairList:
    """The pairs of a table as vertices, in the order of the rows."""
    optional = [name for name in (_PAIR_LABEL, _PAIR_NEGATIVES) if name in table.schema.names]
    ends = [np.empty((0, 2), np.int64)]
    labels = [np.empty(0, _value_type(table, _PAIR_LABEL).dtype)] if _PAIR_LABEL in optional else []
    negatives: list[Ids] = []
    for first_row, batch in table.numbered_batches([columns.src, columns.dst, *optional], CHUNK_EDGES):
        found = [_pair_ids(table, name, batch[name], ids, first_row) for name in (columns.src, columns.dst)]
        ends.append(np.stack(found, axis=1))
        if _PAIR_LABEL in optional:
            labels.append(number_column(f"{table.path}: {_PAIR_LABEL}", batch[_PAIR_LABEL]))
        if _PAIR_NEGATIVES in optional:
            flat, width = flat_lists(f"{table.path}: {_PAIR_NEGATIVES}", batch[_PAIR_NEGATIVES])
            vertices = _pair_ids(table, _PAIR_NEGATIVES, flat, ids, first_row, per_row=width)
            negatives.append(vertices.reshape(-1, width))
    if len({array.shape[1] for array in negatives}) > 1:
        got = ", ".join(sorted({str(array.shape[1]) for array in negatives}))
        raise InputError(
            explain(f"{table.path}: {_PAIR_NEGATIVES}", "lists of one length", got, "pad or cut the lists")
        )
    return PairList(
        np.concatenate(ends),
        np.concatenate(labels) if labels else None,
        np.concatenate(negatives) if negatives else None,
    )


def _pair_ids(table: TableFile, name: str, column: Any, ids: VertexIds, first_row: int, per_row: int = 1) -> Ids:
    """The vertices of a column of pairs. Ids that are not vertices are refused, whatever happens to such edges."""
    vertices = ids.lookup(str(table.path), column)
    unknown = np.flatnonzero(vertices < 0)
    if unknown.size:
        at = int(unknown[0])
        got = f"{column[at].as_py()!r} in row {first_row + at // max(1, per_row)}"
        fix = "remove these pairs, or add the ids to the vertex table (--num-vertices for dense ids)"
        raise InputError(explain(f"{table.path}: {name}", f"ids among the {ids.num_vertices} vertices", got, fix))
    return vertices


def _used_columns(columns: TableColumns, vertices: TableFile | None) -> dict[str, object]:
    """The columns that are used, for the provenance and for the comparison with other hosts."""
    edges: dict[str, object] = {"src": columns.src, "dst": columns.dst, "edge_values": list(columns.edge_values)}
    if vertices is None:
        return edges
    names = {"label": columns.label, "split": columns.split, "feature_list": columns.feature_list}
    found = {what: name for what, name in names.items() if name in vertices.schema.names}
    features = {"features": list(columns.features)} if columns.features else {}
    return edges | {"id": columns.id, "label_type": columns.label_type} | found | features


def _matched(columns: TableColumns, vertices: str | Path, delimiter: str | None) -> TableColumns:
    """``columns`` with the feature patterns replaced by the columns that match."""
    if not any(map(is_pattern, columns.features)):
        return columns
    others = {columns.id, columns.label, columns.split, columns.feature_list}
    names = [name for name in TableFile(vertices, delimiter=delimiter).schema.names if name not in others]
    for pattern in columns.features:
        if not match_columns([pattern], names):
            got = f"columns {', '.join(names)}" if names else "no other columns"
            fix = "correct or leave out this --feature-column"
            raise InputError(explain(vertices, f"a column that matches {pattern}", got, fix))
    return replace(columns, features=tuple(match_columns(columns.features, names)))


def _require_no_vertex_columns(columns: TableColumns) -> None:
    """Refuse options for the vertex table if there is none."""
    default = TableColumns()
    given = {
        "--id-column": columns.id != default.id,
        "--label-column": columns.label != default.label,
        "--label-type": columns.label_type != default.label_type,
        "--split-column": columns.split != default.split,
        "--list-column": columns.feature_list != default.feature_list,
        "--feature-column": bool(columns.features),
    }
    options = [option for option, is_given in given.items() if is_given]
    if options:
        fix = "give the table of vertices with --vertices, or leave these options out"
        raise InputError(explain(", ".join(options), "a vertex table", "edges only", fix))


def _require_vertex_columns(table: TableFile, columns: TableColumns) -> None:
    """Refuse a table without the ids or without a column that was named."""
    default = TableColumns()
    named = {columns.id: "--id-column", **dict.fromkeys(columns.features, "--feature-column")}
    named |= {columns.label: "--label-column"} if columns.label != default.label else {}
    named |= {columns.split: "--split-column"} if columns.split != default.split else {}
    named |= {columns.feature_list: "--list-column"} if columns.feature_list != default.feature_list else {}
    table.require(named)


def _vertex_ids(
    edges: TableFile, vertices: TableFile | None, columns: TableColumns, ids: IdMode, num_vertices: int | None
) -> VertexIds:
    arrow = load_arrow()
    kinds = [edges.schema.field(name).type for name in (columns.src, columns.dst)]
    integers = all(arrow.types.is_integer(kind) for kind in kinds)
    if ids == IdMode.DENSE and not integers:
        raise InputError(explain("ids", "integer ids for --ids dense", kinds[0], "use --ids map"))
    is_mapped = not integers or ids in (IdMode.MAP, IdMode.NAMES)
    if num_vertices is not None and (vertices is not None or is_mapped):
        fix = "leave it out: the vertices are those of the vertex table, or the ids that are mapped"
        raise InputError(explain("num_vertices", "None with a vertex table or mapped ids", num_vertices, fix))
    if vertices is not None:
        return vertex_table_ids(vertices, columns, ids)
    if num_vertices is not None:
        return dense_ids(num_vertices)
    if integers and ids in (IdMode.AUTO, IdMode.DENSE):
        low, high, count = _extent(edges, columns)
        if low >= 0 and (ids == IdMode.DENSE or high < 2 * count):
            return dense_ids(high + 1)
        if ids == IdMode.DENSE:
            raise InputError(explain(str(edges.path), "ids from 0 for --ids dense", low, "use --ids map"))
    return collect_ids(str(edges.path), _columns(edges, [columns.src, columns.dst]), unique=False)


def vertex_table_ids(vertices: TableFile, columns: TableColumns, ids: IdMode) -> VertexIds:
    """The ids in a table of vertices, at least one."""
    where = f"{vertices.path}: {columns.id}"
    found = collect_ids(where, _columns(vertices, [columns.id]), unique=True)
    if found.num_vertices == 0:
        fix = "add the vertices, or leave --vertices out: every id of an edge is a vertex"
        raise InputError(explain(vertices.path, "a row per vertex", "no rows", fix))
    if ids == IdMode.DENSE and found.values is not None:
        got = f"{found.num_vertices} ids from {found.values[0]} to {found.values[-1]}"
        raise InputError(explain(where, "ids 0 .. n-1 for --ids dense", got, "use --ids map"))
    return found


def _columns(table: TableFile, names: list[str]) -> Iterator[Any]:
    for batch in table.batches(names):
        yield from batch.columns


def _extent(edges: TableFile, columns: TableColumns) -> tuple[int, int, int]:
    """Smallest and largest id, and the number of edges: from the statistics of the file, or in one pass."""
    arrow = load_arrow()
    known = [edges.extent(column) for column in (columns.src, columns.dst)]
    if None not in known:
        ends = [end for pair in known if pair is not None for end in pair]
        return min(ends), max(ends), edges.forecast_rows()
    low = 0
    high = -1
    count = 0
    for batch in edges.batches([columns.src, columns.dst]):
        count += batch.num_rows
        for column in batch.columns:
            found = arrow.compute.min_max(column).as_py()
            if found["min"] is not None:
                low = min(low, found["min"])
                high = max(high, found["max"])
    return low, high, count


def edge_chunks(
    table: TableFile,
    columns: TableColumns,
    ids: tuple[VertexIds, VertexIds],
    unknown: UnknownIds,
    held: VertexRange | None = None,
    *,
    both_ends: bool = False,
    row_groups: range | None = None,
) -> Iterator[EdgeChunk]:
    """The edges of a table. ``ids`` are those of sources and destinations, the same object if they are the same.

    Edges outside ``held``, and row groups other than ``row_groups``, may be left out.
    """
    src_ids, dst_ids = ids
    names = list(dict.fromkeys([columns.src, columns.dst, *columns.edge_values]))
    where = str(table.path)
    rows = CHUNK_EDGES if src_ids.values is None and dst_ids.values is None else BATCH_IDS // 2
    near = _bounds(columns, dst_ids, unknown, held, both_ends)
    for first_row, batch in table.numbered_batches(names, rows, near, row_groups):
        ends = [batch[columns.src], batch[columns.dst]]
        if src_ids is dst_ids:  # one look-up: every call makes a hash table
            both = src_ids.lookup(where, load_arrow().concat_arrays(widened_alike(where, ends)))
            src = both[: batch.num_rows]
            dst = both[batch.num_rows :]
        else:
            src = src_ids.lookup(f"{where}: {columns.src}", ends[0])
            dst = dst_ids.lookup(f"{where}: {columns.dst}", ends[1])
        values = {name: number_column(f"{where}: {name}", batch[name]) for name in columns.edge_values}
        dangling = np.flatnonzero((src < 0) | (dst < 0))
        if dangling.size and unknown == UnknownIds.REFUSE:
            first = int(dangling[0])
            wrong = 0 if src[first] < 0 else 1
            example = ends[wrong][first].as_py()
            rows_read = f"rows {first_row}..{first_row + batch.num_rows - 1}"
            got = f"{example!r} in row {first_row + first}; edges with such ids in {rows_read}: {dangling.size}"
            fix = "add these ids to the vertex table, or leave such edges out with --unknown-ids drop"
            raise InputError(explain(where, f"ids among the {ids[wrong].num_vertices} vertices", got, fix))
        num_dropped = dangling.size if held is None else held.count_edges_into(dst[dangling])
        if dangling.size:
            src = np.delete(src, dangling)
            dst = np.delete(dst, dangling)
            values = {name: np.delete(value, dangling) for name, value in values.items()}
        yield EdgeChunk(src, dst, values, num_dropped)


def _bounds(
    columns: TableColumns, ids: VertexIds, unknown: UnknownIds, held: VertexRange | None, both_ends: bool
) -> list[IdBounds]:
    """Bounds of the row groups that a range needs: a group is skipped if none applies. Empty for all groups."""
    if held is None or (unknown == UnknownIds.DROP and held.counts_dangling_edges and ids.values is not None):
        return []  # an unknown id may lie anywhere between known ones
    found = [ids.bounds(column, held) for column in ((columns.dst, columns.src) if both_ends else (columns.dst,))]
    return [bounds for bounds in found if bounds] if all(found) else []


def _value_type(table: TableFile, name: str) -> ValueType:
    try:  # not to_pandas_dtype: older versions of pyarrow need pandas for it
        empty = load_arrow().array([], table.schema.field(name).type)
        dtype = dtype_name(empty.to_numpy(zero_copy_only=False).dtype)
    except (TypeError, NotImplementedError):
        dtype = None
    if dtype is None:
        got = table.schema.field(name).type
        expected = "a column of numbers: bool, int8 to int64, uint8, float16 to float64"
        raise InputError(explain(f"{table.path}: {name}", expected, got, "cast the column to one of these"))
    return ValueType(dtype)
