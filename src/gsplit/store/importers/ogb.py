"""The folders that OGB downloads for node property prediction, read directly, without the ogb package.

Two layouts: ``raw/*.csv.gz`` (arxiv, products, proteins) and ``raw/data.npz`` with ``raw/node-label.npz``
(papers100M). Splits come from ``split/NAME/{train,valid,test}.csv.gz``. Missing labels (NaN) become -1.
Heterogeneous sets are refused. Sets whose file lists each undirected edge once (products, proteins) want
``symmetrise``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.files import Array
from gsplit.store.importers.arrow import number_column
from gsplit.store.importers.headerless_csv import csv_columns
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
    rows_of,
)

__all__ = ["ogb_source"]

_MOST_NUMBERS = 1 << 30
_SPLITS = {"train": "train", "valid": "val", "test": "test"}


def ogb_source(folder: str | Path, *, split: str | None = None) -> GraphSource:
    """The graph in a folder such as ``dataset/ogbn_arxiv``; ``split`` chooses among several."""
    folder = Path(folder)
    raw = folder / "raw"
    targets = _targets(folder, split)
    if (raw / "data.npz").is_file():
        return _binary_source(folder, targets)
    if (raw / "edge.csv.gz").is_file():
        return _csv_source(folder, targets)
    if (raw / "triplet-type-list.csv.gz").is_file() or (raw / "relations").exists():
        fix = "only homogeneous graphs can be imported"
        raise InputError(explain(folder, "a homogeneous OGB set", "a heterogeneous one", fix))
    fix = "give the folder that holds raw/ and split/"
    found = sorted(p.name for p in (raw if raw.is_dir() else folder).iterdir()) if folder.is_dir() else None
    got = "no such folder" if found is None else f"only {', '.join(found[:5]) or 'an empty folder'}"
    raise InputError(explain(folder, "raw/edge.csv.gz or raw/data.npz", got, fix))


def _targets(folder: Path, split: str | None) -> dict[str, npt.NDArray[np.int64]]:
    choices = sorted(p.name for p in (folder / "split").iterdir() if p.is_dir()) if (folder / "split").is_dir() else []
    if (split is None and len(choices) > 1) or (split is not None and split not in choices):
        fix = "choose one with --split"
        raise InputError(explain(folder / "split", f"one of {', '.join(choices) or 'none there'}", split, fix))
    if not choices:
        return {}
    where = folder / "split" / (split or choices[0])
    return {name: _csv_integers(where / f"{file}.csv.gz") for file, name in _SPLITS.items()}


def _csv_integers(path: Path, most: int = _MOST_NUMBERS) -> npt.NDArray[np.int64]:
    """A column of numbers; more than ``most`` are not read: a small archive may hold any number of them."""
    parts, count = [np.empty(0, np.int64)], 0
    for columns in csv_columns(path):
        parts.append(_integers(path, columns[0]))
        count += parts[-1].size
        if count > most:
            raise InputError(explain(path, f"at most {most} numbers", "more", "download the set again"))
    return np.concatenate(parts)


def _total(path: Path) -> int:
    """The sum of a column of counts."""
    counts = _csv_integers(path)
    if counts.size and (int(counts.min()) < 0 or int(counts.max()) > MAX_EDGES):
        raise InputError(explain(path, "counts", f"{counts.min()}..{counts.max()}", "download the set again"))
    return int(counts.sum())


def _integers(path: Path, column: Any) -> npt.NDArray[np.int64]:
    values = number_column(str(path), column)
    if values.dtype.kind not in "iu":
        raise InputError(explain(path, "whole numbers", values.dtype, "download the set again"))
    return values.astype(np.int64)


def _labels(raw: Array) -> Labels:
    """Classes, -1 for NaN; several columns, and one of fractions, as they are."""
    return as_labels(rows_of(raw, "int64" if raw.dtype.kind in "iu" else "float32"), floats_are_classes=True)


def _csv_source(folder: Path, targets: dict[str, npt.NDArray[np.int64]]) -> GraphSource:
    raw = folder / "raw"
    num_vertices, num_edges = _total(raw / "num-node-list.csv.gz"), _total(raw / "num-edge-list.csv.gz")

    def edges() -> Iterator[EdgeChunk]:
        file, found = raw / "edge.csv.gz", 0
        for columns in csv_columns(file):
            if len(columns) != 2:
                raise InputError(explain(file, "two columns", len(columns), "download the set again"))
            src, dst = (_integers(file, column) for column in columns)
            found += src.size
            yield EdgeChunk(src, dst)
        if found != num_edges:
            raise InputError(
                explain(file, f"{num_edges} edges, as num-edge-list says", found, "download the set again")
            )

    features, labels = {}, None
    if (raw / "node-feat.csv.gz").is_file():
        features["x"] = _csv_features(raw / "node-feat.csv.gz")
    if (raw / "node-label.csv.gz").is_file():
        labels = _labels(_csv_matrix(raw / "node-label.csv.gz", num_vertices))
    return GraphSource(
        kind="ogb",
        num_vertices=num_vertices,
        num_edges=num_edges,
        edges=edges,
        features=features,
        y=labels.rows if labels else None,
        targets=targets,
        settings={"folder": plain_name(folder), "layout": "csv"},
        notes=labels.notes if labels else (),
    )


def _csv_matrix(path: Path, num_rows: int) -> Array:
    blocks, count = list[Array](), 0
    for columns in csv_columns(path, floats=True):
        blocks.append(_matrix(path, columns))
        count += blocks[-1].shape[0]
        if count > num_rows:
            break
    if not blocks:
        raise InputError(explain(path, "one row per vertex", "an empty file", "download the set again"))
    if count != num_rows:
        got = "more" if count > num_rows else f"{count} rows"
        raise InputError(explain(path, f"{num_rows} rows, one per vertex", got, "download the set again"))
    return np.concatenate(blocks)


def _matrix(path: Path, columns: list[Any]) -> Array:
    return np.stack([number_column(str(path), column) for column in columns], axis=1)


def _csv_features(path: Path) -> RowStream:
    first = next(csv_columns(path, floats=True), None)
    if first is None:
        raise InputError(explain(path, "one row per vertex", "an empty file", "download the set again"))

    def chunks() -> Iterator[RowChunk]:
        start = 0
        for columns in csv_columns(path, floats=True):
            rows = _matrix(path, columns)
            yield RowChunk(slice(start, start + rows.shape[0]), rows)
            start += rows.shape[0]

    return RowStream(ValueType("float32", (len(first),)), chunks)


def _binary_total(member: NpzMember) -> int:
    counts = member.integers()
    if counts.size and (int(counts.min()) < 0 or int(counts.max()) > MAX_EDGES):
        raise InputError(explain(member.where, "counts", f"{counts.min()}..{counts.max()}", "download the set again"))
    return int(counts.sum())


def _binary_source(folder: Path, targets: dict[str, npt.NDArray[np.int64]]) -> GraphSource:
    files = folder / "raw" / "data.npz", folder / "raw" / "node-label.npz"
    data, second = (npz_members(file) for file in files)
    for name, file, members in (
        ("edge_index", files[0], data),
        ("num_nodes_list", files[0], data),
        ("node_label", files[1], second),
    ):
        if name not in members:
            got = f"only {', '.join(members) or 'an empty archive'}"
            raise InputError(explain(file, f"an array {name}", got, "download the set again"))
    edges, labels = data["edge_index"], _labels(second["node_label"].read())  # one number per vertex
    check_edge_index(edges.where, edges.dtype, edges.shape)
    return GraphSource(
        kind="ogb",
        num_vertices=_binary_total(data["num_nodes_list"]),
        num_edges=edges.shape[1],
        edges=lambda: edge_index_chunks(edges, {}),
        features={"x": feature_rows(data["node_feat"])} if "node_feat" in data else {},
        y=labels.rows,
        targets=targets,
        settings={"folder": plain_name(folder), "layout": "binary"},
        notes=labels.notes,
    )
