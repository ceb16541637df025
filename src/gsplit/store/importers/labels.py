"""Convert labels to one form: an integer class per vertex, -1 for a missing label.

- ``[n, 1]`` integers become ``[n]``; bool becomes classes 0 and 1.
- Floats with NaN whose other values are whole numbers are classes: this is how pandas stores missing integers.
- Other floats are regression values and are not changed, ``[n, 1]`` included: a loss compares them with ``[n, 1]``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gsplit.array_types import Array
from gsplit.store.source import RowChunk, RowStream, ValueType

__all__ = ["Labels", "as_labels"]

_MAX_CLASSES = 1 << 24
"""Whole numbers from here on are not classes: a model has an output for each class."""


@dataclass(frozen=True)
class Labels:
    """Labels for a store. ``notes`` describe how they were changed; empty if they were not.

    ``class_names``: names of the classes, if they had names.
    """

    rows: RowStream
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()


def as_labels(rows: RowStream, *, floats_are_classes: bool = False) -> Labels:
    """Convert labels to the form of a store. ``floats_are_classes``: whole numbers are classes even without NaN."""
    dtype = rows.type.dtype
    row_shape = rows.type.row_shape
    column = " of shape [n, 1]" if row_shape else ""
    if row_shape not in ((), (1,)) or dtype == "bfloat16":
        return Labels(rows)
    if dtype == "bool":
        return Labels(_classes(rows, "int64"), (f"y: bool{column} imported as classes 0 and 1",))
    if not dtype.startswith("float"):
        done = f"y: {dtype}{column} imported as one class per vertex, shape [n]"
        return Labels(_classes(rows, dtype), (done,)) if column else Labels(rows)
    num_missing = _count_missing(rows)
    if num_missing is None:
        return Labels(rows)
    if num_missing or floats_are_classes:
        missing = f"; missing, stored as -1: {num_missing}" if num_missing else ""
        return Labels(_classes(rows, "int64"), (f"y: whole numbers of {dtype}{column} imported as classes{missing}",))
    advice = "for classes, give integers (tables: --label-type classes)"
    return Labels(rows, (f"y: whole numbers of {dtype} kept as values to regress on; {advice}",))


def _classes(rows: RowStream, dtype: str) -> RowStream:
    """Labels as one integer per vertex."""

    def chunks() -> Iterator[RowChunk]:
        for chunk in rows.chunks():
            flat = chunk.rows.reshape(-1)
            if flat.dtype.kind == "f":
                flat = np.where(np.isnan(flat), -1, flat).astype(np.int64)
            yield RowChunk(chunk.vertices, flat)

    return RowStream(ValueType(dtype), chunks)


def _count_missing(rows: RowStream) -> int | None:
    """Number of NaN if all other values are whole numbers that may be classes; else None."""
    num_missing = 0
    num_found = 0
    for chunk in rows.chunks():
        missing = np.isnan(chunk.rows)
        found: Array = chunk.rows[~missing].astype(np.float64)  # float16 cannot be compared with large numbers
        if not ((found >= -1) & (found < _MAX_CLASSES) & (found == np.floor(found))).all():
            return None
        num_missing += int(np.count_nonzero(missing))
        num_found += found.size
    return num_missing if num_found else None
