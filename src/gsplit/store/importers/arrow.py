"""Parquet and CSV read in pieces through pyarrow, with its absence and its errors explained.

pyarrow is an extra: this module is the only one that imports it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.store.files import Array
from gsplit.store.source import CHUNK_EDGES

__all__ = ["Table", "csv_columns", "list_rows", "load_arrow", "number_column"]

_CSV_ROW_BYTES = 16  # a forecast for the progress bar only


def load_arrow() -> Any:
    """The pyarrow package with the parts we use, or a message that says how to install it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        fix = "pip install 'gsplit[arrow]'"
        raise MissingDependencyError(explain("tables and OGB folders", "pyarrow", "no such package", fix)) from None
    return pyarrow


@contextmanager
def _explained(where: object) -> Iterator[None]:
    arrow = load_arrow()
    try:
        yield
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, arrow.ArrowKeyError, OSError) as error:
        text = str(error).splitlines()[0]
        fix = "check the file; a CSV file needs a header row and one type per column (--ids names reads ids as text)"
        raise InputError(explain(where, "a readable table", text, fix)) from None


class Table:
    """A Parquet or CSV table in one file or in a folder of files, read a bounded number of rows at a time."""

    def __init__(self, path: str | Path, *, delimiter: str = ",", text_columns: Sequence[str] = ()) -> None:
        """``text_columns`` are read as text even where a CSV file shows only digits."""
        self.path = Path(path)
        files = sorted(p for p in self.path.rglob("*") if p.is_file()) if self.path.is_dir() else [self.path]
        self._files = [p for p in files if not p.name.startswith((".", "_"))]
        if not self._files or not self._files[0].is_file():
            raise InputError(explain(self.path, "a table, or a folder of them", "nothing there", "check the path"))
        first = self._files[0]
        self._is_csv = not first.name.endswith((".parquet", ".pq"))
        if self._is_csv and not first.name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
            raise InputError(explain(first, "a .parquet, .csv or .csv.gz file", "another", "convert it"))
        self._delimiter = delimiter
        self._types: dict[str, Any] = dict.fromkeys(text_columns, load_arrow().string())
        with _explained(first):
            self.schema = self._csv(first).schema if self._is_csv else self._parquet(first).schema_arrow
        self._types = {field.name: field.type for field in self.schema}  # every file is read as the first one

    def _parquet(self, file: Path) -> Any:
        # a buffer instead of whole column chunks: a row group may be as large as the file
        return load_arrow().parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)

    def _csv(self, file: Path, columns: Sequence[str] | None = None) -> Any:
        csv = load_arrow().csv
        return csv.open_csv(
            file,
            read_options=csv.ReadOptions(block_size=4 << 20),
            parse_options=csv.ParseOptions(delimiter=self._delimiter),
            convert_options=csv.ConvertOptions(column_types=self._types, include_columns=columns),
        )

    def forecast_rows(self) -> int:
        """Number of rows: known for Parquet, guessed from the size for CSV."""
        if self._is_csv:
            return sum(file.stat().st_size for file in self._files) // _CSV_ROW_BYTES
        return sum(self._parquet(file).metadata.num_rows for file in self._files)

    def require(self, columns: Sequence[str]) -> None:
        """Refuse a table without these columns."""
        for column in columns:
            if column not in self.schema.names:
                expected, fix = f"one of {', '.join(self.schema.names)}", "name the column that holds it"
                raise InputError(explain(f"{self.path}: {column}", expected, "none of that name", fix))

    def batches(self, columns: Sequence[str], rows: int = CHUNK_EDGES) -> Iterator[Any]:
        """Record batches of these columns of about ``rows`` rows, one in memory at a time."""
        held: list[Any] = []
        for file in self._files:
            with _explained(file):
                for batch in self._file_batches(file, columns, rows):
                    held.append(batch)
                    if sum(b.num_rows for b in held) >= rows:  # a CSV block may hold few rows
                        yield from _joined(held)
                        held = []
        yield from _joined(held)

    def _file_batches(self, file: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
        if self._is_csv:
            yield from self._csv(file, list(columns))
            return
        for batch in self._parquet(file).iter_batches(rows, columns=list(columns)):
            yield batch.select(list(columns))

    def extent(self, column: str) -> tuple[int, int] | None:
        """Smallest and largest value of a Parquet column as its statistics say; None where they do not."""
        if self._is_csv:
            return None
        ends: list[int] = []
        for file in self._files:
            metadata = self._parquet(file).metadata
            for group in range(metadata.num_row_groups):
                chunks = [metadata.row_group(group).column(c) for c in range(metadata.num_columns)]
                found = next((c.statistics for c in chunks if c.path_in_schema == column), None)
                if found is None or not found.has_min_max:
                    return None
                ends += [found.min, found.max]
        return (min(ends), max(ends)) if ends else None


def _joined(batches: list[Any]) -> Iterator[Any]:
    if batches:
        table = load_arrow().Table.from_batches(batches).combine_chunks()
        yield from (batch for batch in table.to_batches() if batch.num_rows)


def csv_columns(path: Path) -> Iterator[list[Any]]:
    """The columns of a CSV file without a header row, gzipped or not, a block at a time."""
    arrow = load_arrow()
    with _explained(path):
        if path.stat().st_size == 0:
            return
        options = arrow.csv.ReadOptions(autogenerate_column_names=True, block_size=16 << 20)
        with arrow.csv.open_csv(path, read_options=options) as reader:
            for batch in reader:
                yield batch.columns


def number_column(where: str, column: Any) -> Array:
    """A numeric column as a numpy array; nulls become NaN in floats and are refused in integers."""
    arrow = load_arrow()
    kind = column.type
    numeric = arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)
    if not numeric or (column.null_count and not arrow.types.is_floating(kind)):
        got = f"{kind} with {column.null_count} nulls"
        raise InputError(explain(where, "numbers without nulls", got, "convert or fill the column"))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def list_rows(where: str, column: Any) -> Array:
    """A column of equally long lists of numbers as a matrix."""
    arrow = load_arrow()
    flat = number_column(where, column.flatten())
    if arrow.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        lengths = arrow.compute.unique(arrow.compute.list_value_length(column))
        width = lengths[0].as_py() if len(lengths) == 1 else None
    if width is None or column.null_count or flat.size != width * len(column):
        raise InputError(explain(where, "lists of one length, none missing", "others", "pad or fill the lists"))
    return flat.reshape(len(column), width)
