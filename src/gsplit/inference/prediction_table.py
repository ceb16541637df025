"""Predictions as a Parquet or CSV table with the ids that a graph was imported with, written a chunk at a time.

    id      class   output_0   output_1        a row per vertex, ascending by id
    user-1  1       -0.31      2.06

A model with one output has a column ``output``. If classes have names, the names are written in ``class`` and in the
names of the columns: ``output_spam``. A row whose outputs are not finite has an empty ``class``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.files.objects import as_url
from gsplit.files.places import open_whole
from gsplit.store.importers.arrow import load_arrow
from gsplit.store.protocol import OriginalOrder

__all__ = ["TABLES", "PredictionTable", "What", "check_request", "default_what"]

What = Literal["classes", "outputs", "both"]
"""What is written: the class with the largest output, the model's outputs (a classifier's logits), or both."""

TABLES = (".parquet", ".csv")
"""Suffixes of files that are tables."""

_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 16 << 20


def _classes_of(outputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    import torch  # here: the command line imports this module before it announces the run

    from gsplit.inference.metrics import predicted_classes

    classes: npt.NDArray[np.int64] = predicted_classes(torch.tensor(outputs)).numpy()
    return classes


def default_what(path: Path, *, classifies: bool) -> What:
    """The default of ``what`` for a file of this name."""
    return "classes" if path.suffix in TABLES and classifies else "outputs"


def check_request(path: Path, what: str | None, only: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    if path.suffix not in (".npy", *TABLES):
        got = path.suffix or "a name without a suffix"
        fix = "choose one of these: a table joins with yours by id"
        raise InputError(explain(path, "a name that ends in .parquet, .csv or .npy", got, fix))
    if path.suffix == ".npy" and (url := as_url(path)) is not None:
        raise InputError(explain(url, "a .parquet or .csv table on object storage", "a .npy array", "write a table"))
    if what is not None and what not in get_args(What):
        raise InputError(explain("what", f"one of {', '.join(get_args(What))}", what, "choose one"))
    if path.suffix in TABLES:
        load_arrow()
    elif what == "both" or only is not None:
        got = "both classes and outputs" if what == "both" else f"the targets {only}, whose rows would have no id"
        raise InputError(explain(path, "classes or outputs of all vertices", got, "write a .parquet or .csv table"))


@dataclass(frozen=True)
class PredictionTable:
    """A table before it is written. ``rows``: classes or outputs; ``vertices``: their original ids, None for all."""

    what: What
    class_names: tuple[str, ...]
    rows: npt.NDArray[Any]
    vertices: npt.NDArray[np.int64] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns after ``id``."""
        classes = () if self.what == "outputs" else ("class",)
        return classes if self.what == "classes" else (*classes, *self._output_columns)

    @property
    def _output_columns(self) -> tuple[str, ...]:
        if self.rows.ndim == 1 or self.rows.shape[1] == 1:
            return ("output",)
        width = self.rows.shape[1]
        names = self.class_names if len(self.class_names) == width else range(width)
        return tuple(f"output_{name}" for name in names)

    def write(self, path: Path, ids: OriginalOrder, vertex_type: str | None = None) -> None:
        """Write a .parquet or .csv file. The file is complete, or is not there.

        ``vertex_type``: the type of the vertices, in a heterogeneous graph.
        """
        if self.rows.ndim > 2:
            got = f"shape {list(self.rows.shape)}"
            fix = "write .npy, or let forward return two dimensions"
            raise InputError(explain(path, "numbers in one row per vertex", got, fix))
        arrow = load_arrow()
        chunks = self._chunks(ids, vertex_type)
        first = next(chunks)
        kind = arrow.csv.CSVWriter if path.suffix == ".csv" else arrow.parquet.ParquetWriter
        try:
            with open_whole(path) as stream, kind(stream, first.schema) as writer:
                for chunk in chain([first], chunks):
                    writer.write(chunk)
        except OSError as error:
            fix = "free space, or write to another disk"
            raise InputError(explain(path, "room for the table", error.strerror or error, fix)) from None

    def _chunks(self, ids: OriginalOrder, vertex_type: str | None) -> Iterator[Any]:
        """The table in chunks of little memory; at least one chunk."""
        arrow = load_arrow()
        num_rows = self.rows.shape[0]
        row_bytes = max(1, self.rows[:1].nbytes)
        step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))
        for low in range(0, max(1, num_rows), step):
            high = min(num_rows, low + step)
            vertices = np.arange(low, high) if self.vertices is None else self.vertices[low:high]
            found = ids.imported_ids(vertices, vertex_type)
            kind = arrow.string() if isinstance(found, list) else arrow.int64()  # also for a table without rows
            columns = [arrow.array(found, kind), *self._values(self.rows[low:high])]
            yield arrow.table(columns, names=["id", *self.columns])

    def _values(self, rows: npt.NDArray[Any]) -> Iterator[Any]:
        """The columns of some rows, in the order of ``columns``."""
        if self.what != "outputs":
            yield self._named(rows if self.what == "classes" else _classes_of(rows))
        if self.what != "classes":
            wide = rows.reshape(rows.shape[0], prod(rows.shape[1:]))
            yield from (wide.astype(np.float32) if wide.dtype == np.float16 else wide).T

    def _named(self, classes: npt.NDArray[Any]) -> Any:
        """Classes by number or name; those below 0 are empty."""
        arrow = load_arrow()
        numbers = arrow.array(classes, mask=classes < 0)
        return arrow.array(self.class_names, arrow.string()).take(numbers) if self.class_names else numbers
