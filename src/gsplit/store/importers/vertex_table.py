"""The vertex table: features, labels and targets of vertices, in any order."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import (
    LabelType,
    TableColumns,
    TableFile,
    explained,
    guess_column,
    list_rows,
    load_arrow,
    number_column,
)
from gsplit.store.importers.labels import Labels, as_labels
from gsplit.store.importers.vertex_ids import VertexIds
from gsplit.store.manifest import MAX_CLASS_NAME, MAX_NAMED_CLASSES, MAX_WORD
from gsplit.store.source import CHUNK_EDGES, RowChunk, RowStream, ValueType, VertexRange, dtype_name

__all__ = ["VertexData", "read_vertices"]

_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_NO_SPLIT = ("", "none", "nan", "null", "na")
_NAMES_BYTES = 1 << 19  # of all class or column names as JSON, which the settings of a run contain


@dataclass(frozen=True)
class VertexData:
    """Arrays of the vertices. ``notes`` describe what was changed or not imported."""

    features: dict[str, RowStream] = field(default_factory=dict)
    feature_columns: tuple[str, ...] = ()
    labels: Labels | None = None
    targets: dict[str, Ids] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_vertices(table: TableFile, columns: TableColumns, ids: VertexIds) -> VertexData:
    """Find features, labels and targets in the vertex table."""
    features = _features(table, columns, ids)
    labels = _labels(table, columns, ids)
    targets = _targets(table, columns, ids)
    notes = labels.notes if labels else ()
    notes += _drop_unlabelled(targets, labels, ids.num_vertices)
    return VertexData(
        features=features,
        feature_columns=_column_names(columns) if features else (),
        labels=labels,
        targets=targets,
        notes=notes + _notes(table, columns),
    )


def _placed(
    table: TableFile, columns: TableColumns, ids: VertexIds, names: list[str], held: VertexRange | None = None
) -> Iterator[tuple[Array, Any]]:
    """Batches of some columns with the vertices of their rows, without row groups that have none of ``held``."""
    near = ids.bounds(columns.id, held) if held else None
    wanted = list(dict.fromkeys([columns.id, *names]))
    for _, batch in table.numbered_batches(wanted, CHUNK_EDGES // 4, [near] if near else []):
        vertices = ids.lookup(str(table.path), batch[columns.id])
        assert (vertices >= 0).all(), f"{table.path} changed while it was read"
        yield vertices, batch


def _column_names(columns: TableColumns) -> tuple[str, ...]:
    """The names of the feature columns, in order; empty if they are too long to be stored with every run."""
    short = max(map(len, columns.features), default=0) <= MAX_WORD
    return tuple(columns.features) if short and len(json.dumps(columns.features)) <= _NAMES_BYTES else ()


def _features(table: TableFile, columns: TableColumns, ids: VertexIds) -> dict[str, RowStream]:
    """The features ``x`` from number columns or from a column of lists; empty without either."""
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


def _labels(table: TableFile, columns: TableColumns, ids: VertexIds) -> Labels | None:
    """The labels, or None without a label column. Strings become classes in alphabetical order."""
    arrow = load_arrow()
    name = columns.label
    if name not in table.schema.names:
        return None
    where = f"{table.path}: {name}"
    kind = table.schema.field(name).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return _named_classes(table, columns, ids)
    values = columns.label_type == LabelType.VALUES
    whole = not values and (arrow.types.is_integer(kind) or arrow.types.is_boolean(kind))

    def chunks() -> Iterator[RowChunk]:
        for vertices, batch in _placed(table, columns, ids, [name]):
            column = batch[name]
            with explained(where, "use whole numbers below 2**63"):
                if whole:
                    column = column.cast(arrow.int64()).fill_null(-1)
                elif arrow.types.is_integer(kind) or arrow.types.is_boolean(kind):
                    column = column.cast(arrow.int64()).cast(arrow.float64(), safe=False)
            yield RowChunk(vertices, number_column(where, column))

    if whole and arrow.types.is_boolean(kind):
        return Labels(RowStream(ValueType("int64"), chunks), ("y: bool imported as classes 0 and 1",))
    rows = RowStream(ValueType("int64" if whole else "float32"), chunks)
    if values:
        return Labels(rows)
    labels = as_labels(rows, floats_are_classes=columns.label_type == LabelType.CLASSES)
    if columns.label_type == LabelType.CLASSES and labels.rows.type.dtype.startswith("float"):
        fix = "give whole numbers or words, or leave --label-type out"
        raise InputError(explain(where, "classes: whole numbers from 0", f"other values of type {kind}", fix))
    return labels


def _named_classes(table: TableFile, columns: TableColumns, ids: VertexIds) -> Labels:
    arrow = load_arrow()
    name = columns.label
    where = f"{table.path}: {name}"
    if columns.label_type == LabelType.VALUES:
        raise InputError(explain(where, "numbers for --label-type values", "strings", "give numbers, or leave it out"))

    def words(batch: Any) -> Any:
        with explained(where, "write the labels in UTF-8"):
            column = batch[name]
            column = column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column
            return arrow.compute.utf8_trim_whitespace(column.cast(arrow.string()))

    distinct: set[str] = set()
    for batch in table.batches([name], CHUNK_EDGES // 4):
        distinct.update(word for word in arrow.compute.unique(words(batch)).to_pylist() if word)
        if len(distinct) > MAX_NAMED_CLASSES:
            break
    found = sorted(distinct)
    _check_names(where, found)
    index = arrow.array(found, arrow.string())

    def chunks() -> Iterator[RowChunk]:
        for vertices, batch in _placed(table, columns, ids, [name]):
            classes = arrow.compute.index_in(words(batch), value_set=index).cast(arrow.int64()).fill_null(-1)
            yield RowChunk(vertices, np.asarray(classes.to_numpy(zero_copy_only=False)))

    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    note = f"y: strings imported as {len(found)} classes, in this order: {shown}"
    return Labels(RowStream(ValueType("int64"), chunks), (note,), tuple(found))


def _check_names(where: str, names: Sequence[str]) -> None:
    """Refuse too many, too long or no names, as in a column of ids or of free text."""
    fix = "name the column of labels with --label-column, or number the classes"
    if not names:
        raise InputError(explain(where, "a label in some row", "empty rows only", fix))
    if len(names) > MAX_NAMED_CLASSES:
        expected = f"at most {MAX_NAMED_CLASSES} names of classes"
        raise InputError(explain(where, expected, f"more than {MAX_NAMED_CLASSES}", fix))
    num_bytes = len(json.dumps(names))
    if num_bytes > _NAMES_BYTES:
        raise InputError(explain(where, f"names of at most {_NAMES_BYTES} bytes in all", num_bytes, fix))
    longest = max(names, key=len)
    if len(longest) > MAX_CLASS_NAME:
        got = f"{len(longest)}: {longest[:20]!r}..."
        raise InputError(explain(where, f"names of at most {MAX_CLASS_NAME} characters", got, fix))


def _targets(table: TableFile, columns: TableColumns, ids: VertexIds) -> dict[str, Ids]:
    """The targets by the words of the split column, ignoring case."""
    if columns.split not in table.schema.names:
        return {}
    arrow = load_arrow()
    where = f"{table.path}: {columns.split}"
    found: dict[str, list[Array]] = {}
    for vertices, batch in _placed(table, columns, ids, [columns.split]):
        with explained(where, "write the words in UTF-8"):
            words = arrow.compute.unique(batch[columns.split]).to_pylist()
        for word in words:
            plain = str(word or "").strip().lower()
            if plain in _NO_SPLIT:
                continue
            here = arrow.compute.equal(batch[columns.split], word).fill_null(False).to_numpy(zero_copy_only=False)
            if plain not in _SPLITS:
                raise _unknown_split(where, word, int(np.count_nonzero(here)))
            found.setdefault(_SPLITS[plain], []).append(vertices[here])
    return {name: np.sort(np.concatenate(parts)) for name, parts in found.items()}


def _drop_unlabelled(targets: dict[str, Ids], labels: Labels | None, num_vertices: int) -> tuple[str, ...]:
    """Remove vertices without a label from the train targets. Returns notes for the user.

    They stay in val and test: they can be predicted, and evaluation skips them.
    """
    if labels is None or "train" not in targets:
        return ()
    has = np.zeros(num_vertices, bool)
    for chunk in labels.rows.chunks():
        has[chunk.vertices] = ~np.isnan(chunk.rows) if chunk.rows.dtype.kind == "f" else chunk.rows >= 0
    kept = targets["train"][has[targets["train"]]]
    dropped = targets["train"].size - kept.size
    targets["train"] = kept
    return (f"targets train: left out, because they have no label: {dropped:,}",) if dropped else ()


def _unknown_split(where: str, word: object, num_rows: int) -> InputError:
    close = get_close_matches(str(word).lower(), _SPLITS, 1)
    fix = f"write {close[0]}" if close else "rename these values, or leave them empty: such vertices are not targets"
    got = f"{repr(word)[:80]} in {num_rows} rows or more"
    return InputError(explain(where, f"one of {', '.join(_SPLITS)} or nothing", got, fix))


def _notes(table: TableFile, columns: TableColumns) -> tuple[str, ...]:
    """Notes on the columns that are not used, and on options that may have been forgotten."""
    names = table.schema.names
    used = {columns.id, columns.label, columns.split, *(columns.features or [columns.feature_list])}
    unused = [name for name in names if name not in used]
    notes = [f"not imported: {', '.join(name or '(no name)' for name in unused)}"] if unused else []
    wanted_columns = ((columns.label, "labels", "--label-column"), (columns.split, "targets", "--split-column"))
    for wanted, what, option in wanted_columns:
        if wanted not in names and (meant := guess_column(wanted, option, unused)) is not None:
            notes.append(f"no {what}: there is no column {wanted}; if {meant} holds them, add {option} {meant}")
    if not columns.features and columns.feature_list not in names and unused:
        notes.append("no features: name number columns with --feature-column NAME, or several with a pattern, 'f*'")
    return tuple(notes)
