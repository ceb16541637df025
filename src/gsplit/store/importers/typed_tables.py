"""Heterogeneous graphs from Parquet or CSV tables that a TOML file names.

    [vertices.paper]                    # a table of the vertices of each type
    file = "papers.parquet"             # relative to the TOML file
    features = ["f*"]

    [vertices.author]
    num_vertices = 1200                 # instead of a table: ids are 0 .. 1199

    [edges."author writes paper"]       # source type, name, destination type
    file = "writes.csv"
    reverse = "rev_writes"              # also adds paper rev_writes author

Every type has its own ids, mapped as ``tables`` maps those of a homogeneous graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import InputError, explain
from gsplit.files.untrusted import Expected, read_document
from gsplit.graph.types import EdgeType
from gsplit.store.importers.arrow import LabelType, TableColumns, TableFile
from gsplit.store.importers.tables import edge_chunks, open_edge_table, open_vertex_table, vertex_table_ids
from gsplit.store.importers.vertex_ids import IdMode, UnknownIds, VertexIds, dense_ids
from gsplit.store.importers.vertex_table import VertexData, read_vertices
from gsplit.store.manifest import MAX_VERTICES
from gsplit.store.source import EdgeChunk, GraphSource, plain_name

__all__ = ["typed_tables_source"]

_EXPECTED = Expected('a TOML file with [vertices.TYPE] and [edges."SRC NAME DST"]', "see docs/heterogeneous.md")
_OPTIONS = {
    "--id-column": "id =",
    "--label-column": "label =",
    "--label-type": "label_type =",
    "--split-column": "split =",
    "--list-column": "feature_list =",
    "--feature-column": "features =",
    "--src": "src =",
    "--dst": "dst =",
    "--unknown-ids": "unknown_ids =",
    "--ids": "ids =",
    "--vertices": "file =",
}
"""Options in the messages of the importer of homogeneous tables, and the keys that replace them here."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _VertexTable(_Table):
    file: str | None = None
    num_vertices: Annotated[int | None, Field(ge=0, le=MAX_VERTICES)] = None
    id: str = "id"
    label: str = "y"
    label_type: LabelType = LabelType.AUTO
    split: str = "split"
    feature_list: str = "x"
    features: list[str] = []

    @property
    def columns(self) -> TableColumns:
        return TableColumns(
            id=self.id,
            label=self.label,
            split=self.split,
            feature_list=self.feature_list,
            features=tuple(self.features),
            label_type=self.label_type,
        )


class _EdgeTable(_Table):
    file: str
    src: str = "src"
    dst: str = "dst"
    reverse: str | None = None


class _TypedTables(_Table):
    ids: IdMode = IdMode.AUTO
    unknown_ids: UnknownIds = UnknownIds.REFUSE
    delimiter: str | None = None
    vertices: Annotated[dict[str, _VertexTable], Field(min_length=1)]
    edges: dict[str, _EdgeTable] = {}


@dataclass(frozen=True)
class _Relation:
    """An edge type and the table of its edges, which a reverse relation reads the other way."""

    edge_type: EdgeType
    table: TableFile
    columns: TableColumns


def typed_tables_source(path: str | Path) -> GraphSource:
    """The graph in the tables that a TOML file names."""
    path = Path(path)
    try:
        tables = _TypedTables.model_validate(read_document(path, _EXPECTED, toml=True))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise _EXPECTED.refuse(path, f"key {key}: {first['msg']}") from None
    ids: dict[str, VertexIds] = {}
    vertices: dict[str, GraphSource] = {}
    for name, found in tables.vertices.items():
        with _explained(f"{path}: vertices.{name}"):
            ids[name], vertices[name] = _read_type(path.parent, name, found, tables)
    relations: list[_Relation] = []
    for name, edge_table in tables.edges.items():
        with _explained(f"{path}: edges.{name!r}"):
            relations += _relations(path.parent, name, edge_table, tables, ids)
    offsets = dict(zip(ids, [0, *accumulate(found.num_vertices for found in ids.values())], strict=False))
    return GraphSource(
        kind="typed",
        num_vertices=sum(found.num_vertices for found in ids.values()),
        num_edges=sum(relation.table.forecast_rows() for relation in relations),
        edges=lambda: _all_edges(path, relations, ids, offsets, tables.unknown_ids),
        settings={"tables": plain_name(path), "ids": tables.ids, "unknown_ids": tables.unknown_ids},
        notes=tuple(f"{name}: {note}" for name, source in vertices.items() for note in source.notes),
        vertices=vertices,
        edge_types=tuple(relation.edge_type for relation in relations),
    )


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Messages about tables, with the place in the TOML file and its keys."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {_with_keys(str(error))}") from None


def _with_keys(text: str) -> str:
    for option, key in _OPTIONS.items():
        text = text.replace(option, key)
    return text


def _read_type(folder: Path, name: str, found: _VertexTable, tables: _TypedTables) -> tuple[VertexIds, GraphSource]:
    """The ids of a type's vertices, and these as a source without edges."""
    if (found.file is None) == (found.num_vertices is None):
        got = "both" if found.file is not None else "neither"
        fix = "give the table of the vertices, or their number if ids are 0 .. n-1"
        raise InputError(explain(name, "file or num_vertices", got, fix))
    data = VertexData()
    if found.num_vertices is not None:
        _require_defaults(name, found)
        ids = dense_ids(found.num_vertices)
    else:
        assert found.file is not None
        table, columns = open_vertex_table(folder / found.file, found.columns, tables.ids, tables.delimiter)
        ids = vertex_table_ids(table, columns, tables.ids)
        data = read_vertices(table, columns, ids)
    return ids, GraphSource(
        kind="typed",
        num_vertices=ids.num_vertices,
        num_edges=0,
        edges=lambda: iter(()),
        features=data.features,
        feature_columns=data.feature_columns,
        y=data.labels.rows if data.labels else None,
        class_names=data.labels.class_names if data.labels else (),
        targets=data.targets,
        vertex_ids=ids.as_integers(),
        vertex_names=ids.as_names(),
        notes=tuple(map(_with_keys, data.notes)),
    )


def _require_defaults(name: str, found: _VertexTable) -> None:
    given = sorted(found.model_fields_set - {"num_vertices"})
    if given:
        raise InputError(explain(name, "a file for these keys", ", ".join(given), "add file, or remove the keys"))


def _relations(
    folder: Path, name: str, found: _EdgeTable, tables: _TypedTables, ids: dict[str, VertexIds]
) -> list[_Relation]:
    """The relation of a table and, if wanted, its reverse."""
    words = name.split()
    if len(words) != 3 or words[0] not in ids or words[2] not in ids:
        expected = f'"SRC NAME DST" with vertex types of {", ".join(ids)}'
        raise InputError(explain("edge type", expected, repr(name), 'write for example "author writes paper"'))
    src, word, dst = words
    columns = TableColumns(src=found.src, dst=found.dst)
    table = open_edge_table(folder / found.file, columns, tables.ids, tables.delimiter)
    relations = [_Relation((src, word, dst), table, columns)]
    if found.reverse is not None:
        turned = TableColumns(src=found.dst, dst=found.src)
        relations.append(_Relation((dst, found.reverse, src), table, turned))
    return relations


def _all_edges(
    path: Path, relations: list[_Relation], ids: dict[str, VertexIds], offsets: dict[str, int], unknown: UnknownIds
) -> Iterator[EdgeChunk]:
    for number, relation in enumerate(relations):
        src, _, dst = relation.edge_type
        with _explained(f"{path}: edges.{' '.join(relation.edge_type)!r}"):
            for chunk in edge_chunks(relation.table, relation.columns, (ids[src], ids[dst]), unknown):
                fused = chunk.src + offsets[src], chunk.dst + offsets[dst]
                yield EdgeChunk(*fused, num_dropped=chunk.num_dropped, relation=number)
