"""Parquet and CSV read in pieces through pyarrow, with its absence and its errors explained.

pyarrow is an extra: this module is the only one that imports it.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.store.files import Array
from gsplit.store.importers.table_columns import guess_column
from gsplit.store.source import CHUNK_EDGES

__all__ = ["IdBounds", "Table", "explained", "list_rows", "load_arrow", "number_column"]

BATCH_BYTES = 64 << 20
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
def explained(where: object, fix: str, columns: Sequence[str] = ()) -> Iterator[None]:
    """Turn what pyarrow raises while reading into our message; it knows ``columns`` by their numbers."""
    arrow = load_arrow()
    try:
        yield
    except InputError:
        raise
    except (arrow.ArrowException, OSError, KeyError, ValueError, TypeError, OverflowError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if (found := _CSV_COLUMN.search(text)) and int(found[1]) < len(columns):
            text = text.replace(found[0], f"column {columns[int(found[1])]}")
        raise InputError(explain(where, "a readable table", text, fix)) from None


def _first_line(file: Path) -> str:
    """The names of the columns as they stand in a CSV file, gzipped or not."""
    with explained(file, _TABLE_FIX), load_arrow().input_stream(file, compression="detect") as stream:
        return str(stream.read(_LINE_BYTES).split(b"\n")[0].decode("utf-8", "replace")).strip("\ufeff\r")


_CSV_COLUMN = re.compile(r"In CSV column #(\d+)")
_DELIMITERS = ",;\t|"
_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class IdBounds:
    """Where the ids of a range of vertices lie: from ``low`` to ``high``, both included; none if high is below low.

    With ``strays``, ids that are below 0, above ``largest`` or missing are looked for too.
    """

    column: str
    low: int
    high: int
    largest: int
    strays: bool

    def may_be_in(self, found: Any) -> bool:
        """Whether a row group with these statistics of the column may have such an id."""
        if found is None or not found.has_min_max or not isinstance(found.min, int):
            return True
        if self.strays and (not found.has_null_count or found.null_count or found.min < 0 or found.max > self.largest):
            return True
        return bool(found.min <= self.high and found.max >= self.low)


_TABLE_FIX = (
    "check the file; a CSV file needs a header row, the right --delimiter and one type per column "
    "(--ids names reads ids as text; an empty cell is a missing number)"
)


class Table:
    """A Parquet or CSV table in one file or in a folder of files, read a bounded number of rows at a time."""

    def __init__(
        self,
        path: str | Path,
        *,
        delimiter: str | None = None,
        text_columns: Sequence[str] = (),
        number_columns: Sequence[str] = (),
    ) -> None:
        """In CSV, ``text_columns`` are read as text and ``number_columns`` as floats, whatever the first rows show."""
        self.path = Path(path)
        files = [self.path]
        if self.path.is_dir():  # as Spark and others write them, with marker files beside the data
            files = sorted(p for p in self.path.rglob("*") if p.is_file() and not p.name.startswith((".", "_")))
            outside = [p for p in files if not p.resolve().is_relative_to(self.path.resolve())]
            if outside:
                got, fix = f"a link that leads out, {outside[0].name}", "put the file itself there"
                raise InputError(explain(self.path, "a folder of tables", got, fix))
        self._files = files
        if not self._files or not self._files[0].is_file():
            got = "a folder without files" if self.path.is_dir() else "no such file"
            raise InputError(explain(self.path, "a table, or a folder of them", got, "check the path"))
        first = self._files[0]
        self.is_csv = not first.name.endswith((".parquet", ".pq"))
        if self.is_csv and not first.name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
            got = f"one that ends in {first.suffix}" if first.suffix else "one without an ending"
            raise InputError(explain(first, "a .parquet, .csv or .csv.gz file", got, "convert it"))
        if delimiter is not None and len(delimiter) != 1:
            raise InputError(explain("delimiter", "one character", repr(delimiter), "give for example ';' or $'\\t'"))
        line = _first_line(first) if self.is_csv else ""
        self._delimiter = delimiter or max(_DELIMITERS, key=line.count)  # the first of those that come equally often
        arrow = load_arrow()
        self._types: dict[str, Any] = dict.fromkeys(number_columns, arrow.float64())
        self._types |= dict.fromkeys(text_columns, arrow.string())
        with explained(first, _TABLE_FIX, line.split(self._delimiter)):
            self.schema = self._csv(first).schema if self.is_csv else self._parquet(first).schema_arrow
            names = list(self.schema.names)
        if len(set(names)) != len(names):
            raise InputError(explain(first, "every column name once", names, "rename the columns"))
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

    def identity(self) -> str:
        """The names and sizes of the files in short: another one for another table, as a rule."""
        places = self.path if self.path.is_dir() else self.path.parent
        said = [f"{file.relative_to(places)} {file.stat().st_size}" for file in self._files]
        return hashlib.sha256("\n".join(said).encode("utf-8", "surrogateescape")).hexdigest()

    def modified(self) -> float:
        """When a file of it was last written, in seconds as ``stat`` has them."""
        return max(file.stat().st_mtime for file in self._files)

    def forecast_rows(self) -> int:
        """Number of rows: known for Parquet, guessed from the size for CSV."""
        if self.is_csv:
            return sum(file.stat().st_size for file in self._files) // _CSV_ROW_BYTES
        return sum(self._parquet(file).metadata.num_rows for file in self._files)

    def require(self, columns: Mapping[str, str]) -> None:
        """Refuse a table without these columns, each given with the option that names it."""
        for column, option in columns.items():
            if column not in self.schema.names:
                meant = guess_column(column, option, self.schema.names)
                fix = f"name the column that holds it: {option} {'NAME' if meant is None else shlex.quote(meant)}"
                if meant is not None and meant.strip() == column:
                    fix = "remove the spaces around names and values"
                got = ", ".join(self.schema.names)
                raise InputError(explain(self.path, f"a column {column}", f"columns {got}", fix))

    def batches(self, columns: Sequence[str], rows: int = CHUNK_EDGES) -> Iterator[Any]:
        """Record batches of these columns of about ``rows`` rows, one in memory at a time."""
        for _, batch in self.numbered_batches(columns, rows):
            yield batch

    def numbered_batches(
        self, columns: Sequence[str], rows: int, near: Sequence[IdBounds] = ()
    ) -> Iterator[tuple[int, Any]]:
        """The same, each with the number of its first row. ``near``: without row groups that cannot have such ids."""
        held: list[Any] = []
        row = 0  # the table's row that comes after those held
        for file in self._files:
            with explained(file, _TABLE_FIX, self.schema.names):
                for skipped, batch in self._file_batches(file, columns, rows, near):
                    if skipped:
                        yield from _joined(row, held)
                        held, row = [], row + skipped
                    held.append(batch)
                    row += batch.num_rows
                    if sum(b.num_rows for b in held) >= rows or sum(b.nbytes for b in held) >= BATCH_BYTES:
                        yield from _joined(row, held)  # a CSV block may hold few rows, and long strings many bytes
                        held = []
        yield from _joined(row, held)

    def _file_batches(
        self, file: Path, columns: Sequence[str], rows: int, near: Sequence[IdBounds]
    ) -> Iterator[tuple[int, Any]]:
        """Batches with the number of rows left out before each; the last may be an empty one."""
        if self.is_csv:
            yield from ((0, batch) for batch in self._csv(file, list(columns)))
            return
        arrow, skipped, opened = load_arrow(), 0, self._parquet(file)
        wanted = arrow.schema([self.schema.field(name) for name in columns])
        for needed, groups in groupby(range(opened.metadata.num_row_groups), lambda g: _may_be_in(opened, g, near)):
            numbers = list(groups)
            if not needed:
                skipped += sum(opened.metadata.row_group(number).num_rows for number in numbers)
                continue
            for batch in opened.iter_batches(min(rows, CHUNK_EDGES), row_groups=numbers, columns=list(columns)):
                yield skipped, batch.select(list(columns)).cast(wanted)  # every file is read as the first one
                skipped = 0
        if skipped:
            yield skipped, arrow.RecordBatch.from_pylist([], schema=wanted)

    def extent(self, column: str) -> tuple[int, int] | None:
        """Smallest and largest value of a Parquet column as its statistics say; None where they do not."""
        if self.is_csv:
            return None
        ends: list[int] = []
        for file in self._files:
            opened = self._parquet(file)
            for group in range(opened.metadata.num_row_groups):
                found = _statistics(opened, group, column)
                if found is None or not found.has_min_max or not isinstance(found.min, int):
                    return None
                ends += [found.min, found.max]
        return (min(ends), max(ends)) if ends else None


def _statistics(opened: Any, group: int, column: str) -> Any:
    """What a Parquet file says of a column of one of its row groups; None where it does not."""
    chunks = (opened.metadata.row_group(group).column(c) for c in range(opened.metadata.num_columns))
    return next((c.statistics for c in chunks if c.path_in_schema == column), None)


def _may_be_in(opened: Any, group: int, near: Sequence[IdBounds]) -> bool:
    return not near or any(bounds.may_be_in(_statistics(opened, group, bounds.column)) for bounds in near)


def _joined(stop_row: int, batches: list[Any]) -> Iterator[tuple[int, Any]]:
    """Batches as few, each with its first row; ``stop_row`` comes after the last."""
    if batches:
        table = load_arrow().Table.from_batches(batches).combine_chunks()
        row = stop_row - table.num_rows
        for batch in table.to_batches():
            if batch.num_rows:
                yield row, batch
            row += batch.num_rows


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
    if not (
        arrow.types.is_list(column.type)
        or arrow.types.is_large_list(column.type)
        or arrow.types.is_fixed_size_list(column.type)
    ):
        fix = "make it a column of lists, or name number columns with --feature-column"
        raise InputError(explain(where, "lists of numbers", column.type, fix))
    flat = number_column(where, column.flatten())
    if arrow.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        lengths = arrow.compute.unique(arrow.compute.list_value_length(column))
        width = lengths[0].as_py() if len(lengths) == 1 else None
    if width is None or column.null_count or flat.size != width * len(column):
        ends = arrow.compute.min_max(arrow.compute.list_value_length(column)).as_py()
        got = f"{column.null_count} missing, lengths {ends['min']}..{ends['max']} in {len(column)} rows"
        raise InputError(explain(where, "lists of one length, none missing", got, "pad or fill the lists"))
    return flat.reshape(len(column), width)
