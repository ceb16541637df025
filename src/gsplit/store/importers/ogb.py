"""Folders that OGB downloads for node property prediction, read without the ogb package.

Three layouts: ``raw/*.csv.gz`` (arxiv, products, proteins), ``raw/data.npz`` with ``raw/node-label.npz``
(papers100M), and a folder of ``csv.gz`` files for every vertex type and relation (mag). Splits are in
``split/NAME/{train,valid,test}.csv.gz``, of a heterogeneous set in ``split/NAME/TYPE/``. Missing labels (NaN) become
-1. Sets that list each undirected edge once (products, proteins) need ``symmetrise``; ``reverse`` adds the reverse of
every relation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.store.importers.arrow import explained, load_arrow, number_column
from gsplit.store.importers.labels import Labels, as_labels
from gsplit.store.importers.npz import edge_index_chunks, feature_rows
from gsplit.store.importers.npz_file import NpzMember, npz_members
from gsplit.store.manifest import MAX_EDGES
from gsplit.store.source import (
    EdgeChunk,
    GraphSource,
    RowChunk,
    RowStream,
    ValueType,
    check_edge_index,
    plain_name,
    stream_rows,
)

__all__ = ["ogb_source"]

_MAX_NUMBERS = 1 << 30
_MAX_LIST_BYTES = 1 << 20  # of a file that lists types
_AGAIN = "download the set again"
_SPLITS = {"train": "train", "valid": "val", "test": "test"}


def ogb_source(folder: str | Path, *, split: str | None = None, reverse: bool = False) -> GraphSource:
    """The graph in a folder such as ``dataset/ogbn_arxiv``; ``split`` chooses among several.

    ``reverse``: for every relation (src, NAME, dst) of a heterogeneous set also (dst, rev_NAME, src).
    """
    folder = Path(folder)
    raw = folder / "raw"
    where = _split_folder(folder, split)
    if (raw / "triplet-type-list.csv.gz").is_file():
        return _typed_source(folder, where, reverse=reverse)
    for file, make_source in (("data.npz", _binary_source), ("edge.csv.gz", _csv_source)):
        if not (raw / file).is_file():
            continue
        if reverse:
            fix = "use --symmetrise to add the reverse of every edge"
            raise InputError(explain("reverse", "a heterogeneous OGB set", f"{folder} without types", fix))
        return make_source(folder, _targets(where))
    fix = "give the folder that holds raw/ and split/"
    found = sorted(p.name for p in (raw if raw.is_dir() else folder).iterdir()) if folder.is_dir() else None
    got = "no such folder" if found is None else f"only {', '.join(found[:5]) or 'an empty folder'}"
    raise InputError(explain(folder, "raw/edge.csv.gz, raw/data.npz or raw/triplet-type-list.csv.gz", got, fix))


def _split_folder(folder: Path, split: str | None) -> Path | None:
    choices = sorted(p.name for p in (folder / "split").iterdir() if p.is_dir()) if (folder / "split").is_dir() else []
    if (split is None and len(choices) > 1) or (split is not None and split not in choices):
        fix = "choose one with --split"
        raise InputError(explain(folder / "split", f"one of {', '.join(choices) or 'no splits'}", split, fix))
    return folder / "split" / (split or choices[0]) if choices else None


def _targets(where: Path | None) -> dict[str, Ids]:
    if where is None:
        return {}
    if (where / "train.pt").exists():
        got = f"{where / 'train.pt'}, a pickle, which could run any program"
        fix = "load the set with the ogb package, then use gsplit.from_pyg(data, path, pairs=...)"
        raise InputError(explain(where, "an OGB set for node property prediction", got, fix))
    return {name: _csv_integers(where / f"{file}.csv.gz") for file, name in _SPLITS.items()}


def _csv_columns(path: Path, *, floats: bool = False) -> Iterator[list[Any]]:
    """The columns of a CSV file without a header row, gzipped or not, a block at a time."""
    arrow = load_arrow()
    with explained(path, _AGAIN):
        if path.stat().st_size == 0:
            return
        options = arrow.csv.ReadOptions(autogenerate_column_names=True, block_size=16 << 20)
        types: dict[str, Any] = {}
        if floats:
            with arrow.csv.open_csv(path, read_options=options) as reader:
                types = dict.fromkeys(reader.schema.names, arrow.float64())
        convert = arrow.csv.ConvertOptions(column_types=types)
        parse = arrow.csv.ParseOptions(ignore_empty_lines=not floats)  # a missing label may be an empty line
        with arrow.csv.open_csv(path, read_options=options, convert_options=convert, parse_options=parse) as reader:
            for batch in reader:
                yield batch.columns


def _csv_integers(path: Path, limit: int = _MAX_NUMBERS) -> Ids:
    """A column of at most ``limit`` integers: a small archive may contain any number of them."""
    parts = [np.empty(0, np.int64)]
    count = 0
    for columns in _csv_columns(path):
        parts.append(_integers(path, columns[0]))
        count += parts[-1].size
        if count > limit:
            raise InputError(explain(path, f"at most {limit} numbers", f"{count} or more", _AGAIN))
    return np.concatenate(parts)


def _total(path: Path) -> int:
    return _sum_counts(str(path), _csv_integers(path))


def _sum_counts(where: str, counts: Ids) -> int:
    if counts.size and (int(counts.min()) < 0 or int(counts.max()) > MAX_EDGES):
        raise InputError(explain(where, f"counts from 0 to {MAX_EDGES}", f"{counts.min()}..{counts.max()}", _AGAIN))
    return int(counts.sum())


_CSV_FILES = [f"{name}.csv.gz" for name in ("num-node-list", "num-edge-list", "edge", "node-feat", "node-label")]


def _integers(path: Path, column: Any) -> Ids:
    values = number_column(str(path), column)
    if values.dtype.kind not in "iu":
        raise InputError(explain(path, "whole numbers", values.dtype, _AGAIN))
    return values.astype(np.int64)


def _labels(where: object, raw: Array) -> Labels:
    """Classes, with -1 for NaN. Several columns, and a column of fractions, are not changed."""
    largest = float(np.nanmax(np.abs(raw), initial=0.0)) if raw.dtype.kind == "f" else 0.0
    if float(np.finfo(np.float32).max) < largest < np.inf:
        raise InputError(explain(where, "labels within the range of float32", largest, _AGAIN))
    return as_labels(stream_rows(raw, "int64" if raw.dtype.kind in "iu" else "float32"), floats_are_classes=True)


def _csv_source(folder: Path, targets: dict[str, Ids]) -> GraphSource:
    raw = folder / "raw"
    num_vertices = _total(raw / "num-node-list.csv.gz")
    num_edges = _total(raw / "num-edge-list.csv.gz")
    features, labels = _csv_vertices(raw / "node-feat.csv.gz", raw / "node-label.csv.gz", num_vertices)
    return GraphSource(
        kind="ogb",
        num_vertices=num_vertices,
        num_edges=num_edges,
        edges=lambda: (EdgeChunk(src, dst) for src, dst in _csv_edges(raw / "edge.csv.gz", num_edges)),
        features=features,
        y=labels.rows if labels else None,
        targets=targets,
        settings={"folder": plain_name(folder), "layout": "csv"},
        notes=(*(labels.notes if labels else ()), *_left_out((each.name for each in raw.iterdir()), _CSV_FILES)),
    )


def _left_out(names: Iterable[str], read: Iterable[str]) -> tuple[str, ...]:
    """A note about what is in a dataset and not imported."""
    left = sorted(set(names).difference(read))
    return (f"not imported: {', '.join(left)}",) if left else ()


def _csv_edges(path: Path, num_edges: int) -> Iterator[tuple[Ids, Ids]]:
    found = 0
    for columns in _csv_columns(path):
        if len(columns) != 2:
            raise InputError(explain(path, "two columns", len(columns), _AGAIN))
        found += len(columns[0])
        yield _integers(path, columns[0]), _integers(path, columns[1])
    if found != num_edges:
        raise InputError(explain(path, f"{num_edges} edges, as in num-edge-list", found, _AGAIN))


def _csv_vertices(features: Path, labels: Path, num_vertices: int) -> tuple[dict[str, RowStream], Labels | None]:
    """The features and labels in two files, each of which may be missing."""
    return (
        {"x": _csv_features(features)} if features.is_file() else {},
        _labels(labels, _csv_matrix(labels, num_vertices)) if labels.is_file() else None,
    )


def _typed_source(folder: Path, split: Path | None, *, reverse: bool) -> GraphSource:
    raw = folder / "raw"
    counts = _vertex_counts(raw / "num-node-dict.csv.gz")
    relations = _relations(raw / "triplet-type-list.csv.gz", counts)
    vertices: dict[str, GraphSource] = {}
    for name, count in counts.items():
        files = (raw / "node-feat" / name / "node-feat.csv.gz", raw / "node-label" / name / "node-label.csv.gz")
        features, labels = _csv_vertices(*files, count)
        vertices[name] = GraphSource(
            kind="ogb",
            num_vertices=count,
            num_edges=0,
            edges=lambda: iter(()),
            features=features,
            y=labels.rows if labels else None,
            targets=_targets(split / name) if split is not None and (split / name).is_dir() else {},
            notes=labels.notes if labels else (),
        )
    folders = [raw / "relations" / "___".join(relation) for relation in relations]
    num_edges = [_total(of / "num-edge-list.csv.gz") for of in folders]
    offsets = dict(zip(counts, [0, *accumulate(counts.values())], strict=False))

    def edges() -> Iterator[EdgeChunk]:
        for number, (relation, of, count) in enumerate(zip(relations, folders, num_edges, strict=True)):
            for src, dst in _csv_edges(of / "edge.csv.gz", count):
                ends = _fuse(of, src, relation[0], counts, offsets), _fuse(of, dst, relation[2], counts, offsets)
                yield EdgeChunk(*ends, relation=number)
                if reverse:
                    yield EdgeChunk(*ends[::-1], relation=len(relations) + number)

    turned = [(dst, f"rev_{name}", src) for src, name, dst in relations] if reverse else []
    return GraphSource(
        kind="ogb",
        num_vertices=sum(counts.values()),
        num_edges=sum(num_edges) * (2 if reverse else 1),
        edges=edges,
        settings={"folder": plain_name(folder), "layout": "typed csv", "reverse": reverse},
        notes=(
            *(f"{name}: {note}" for name, source in vertices.items() for note in source.notes),
            *_left_out((f"{of.name}/{each.name}" for of in folders for each in of.glob("edge-feat*")), ()),
        ),
        vertices=vertices,
        edge_types=(*relations, *turned),
    )


def _fuse(where: Path, ids: Ids, name: str, counts: Mapping[str, int], offsets: Mapping[str, int]) -> Ids:
    """Ids in a type as fused ids."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= counts[name]):
        got = f"{ids.min()}..{ids.max()}"
        raise InputError(explain(where, f"ids of {name} from 0 to {counts[name] - 1}", got, _AGAIN))
    return ids + offsets[name]


def _read_list(path: Path) -> list[list[str]]:
    """The rows of a small CSV file of names of types and numbers."""
    with explained(path, _AGAIN), load_arrow().input_stream(path, compression="gzip") as stream:
        content = stream.read(_MAX_LIST_BYTES + 1)
        if len(content) > _MAX_LIST_BYTES:
            raise InputError(explain(path, f"at most {_MAX_LIST_BYTES} bytes", "more", _AGAIN))
        rows = [line.split(",") for line in content.decode().splitlines() if line]
    for word in [word for row in rows for word in row]:
        if "/" in word or "\0" in word or word in ("", ".", ".."):  # names of types are names of folders
            raise InputError(explain(path, "names of folders", repr(word), _AGAIN))
    return rows


def _vertex_counts(path: Path) -> dict[str, int]:
    """The number of vertices of every type: a row of names, then a row of numbers."""
    rows = _read_list(path)
    if len(rows) != 2 or len(rows[0]) != len(rows[1]) or not all(count.isdecimal() for count in rows[1]):
        raise InputError(explain(path, "a row of vertex types and a row of their counts", rows[:3], _AGAIN))
    return {name: int(count) for name, count in zip(*rows, strict=True)}


def _relations(path: Path, counts: Mapping[str, int]) -> list[EdgeType]:
    rows = _read_list(path)
    for row in rows:
        if len(row) != 3 or row[0] not in counts or row[2] not in counts:
            raise InputError(explain(path, "rows of source type, name, destination type", row, _AGAIN))
    return [(src, name, dst) for src, name, dst in rows]


def _csv_matrix(path: Path, num_rows: int) -> Array:
    blocks = list[Array]()
    count = 0
    for columns in _csv_columns(path, floats=True):
        blocks.append(_matrix(path, columns))
        count += blocks[-1].shape[0]
        if count > num_rows:
            break
    if not blocks:
        raise InputError(explain(path, "one row per vertex", "an empty file", _AGAIN))
    if count != num_rows:
        got = f"{count} rows or more" if count > num_rows else f"{count} rows"
        raise InputError(explain(path, f"{num_rows} rows, one per vertex", got, _AGAIN))
    return np.concatenate(blocks)


def _matrix(path: Path, columns: list[Any]) -> Array:
    return np.stack([number_column(str(path), column) for column in columns], axis=1)


def _csv_features(path: Path) -> RowStream:
    first = next(_csv_columns(path, floats=True), None)
    if first is None:
        raise InputError(explain(path, "one row per vertex", "an empty file", _AGAIN))

    def chunks() -> Iterator[RowChunk]:
        start = 0
        for columns in _csv_columns(path, floats=True):
            rows = _matrix(path, columns)
            yield RowChunk(slice(start, start + rows.shape[0]), rows)
            start += rows.shape[0]

    return RowStream(ValueType("float32", (len(first),)), chunks)


def _members(path: Path, names: Sequence[str]) -> dict[str, NpzMember]:
    """The arrays of a ``.npz`` file, which must include ``names``."""
    members = npz_members(path)
    for name in names:
        if name not in members:
            got = f"only {', '.join(members) or 'an empty archive'}"
            raise InputError(explain(path, f"an array {name}", got, _AGAIN))
    return members


def _binary_source(folder: Path, targets: dict[str, Ids]) -> GraphSource:
    data = _members(folder / "raw" / "data.npz", ("edge_index", "num_nodes_list"))
    edges = data["edge_index"]
    label_file = folder / "raw" / "node-label.npz"
    labels = _labels(label_file, _members(label_file, ("node_label",))["node_label"].read())
    check_edge_index(edges.where, edges.dtype, edges.shape)
    return GraphSource(
        kind="ogb",
        num_vertices=_sum_counts(data["num_nodes_list"].where, data["num_nodes_list"].integers()),
        num_edges=edges.shape[1],
        edges=lambda: edge_index_chunks(edges, {}),
        features={"x": feature_rows(data["node_feat"])} if "node_feat" in data else {},
        y=labels.rows,
        targets=targets,
        settings={"folder": plain_name(folder), "layout": "binary"},
        notes=(*labels.notes, *_left_out(data, ("edge_index", "num_nodes_list", "num_edges_list", "node_feat"))),
    )
