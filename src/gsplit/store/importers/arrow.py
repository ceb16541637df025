"""Parquet and CSV read in pieces through pyarrow, with its absence and its errors explained.

pyarrow is an extra: this module is the only one that imports it.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.store.files import Array
from gsplit.store.importers.table_columns import guess_column
from gsplit.store.source import CHUNK_EDGES

__all__ = ["Table", "csv_columns", "explained", "list_rows", "load_arrow", "number_column"]

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
        self._is_csv = not first.name.endswith((".parquet", ".pq"))
        if self._is_csv and not first.name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
            got = f"one that ends in {first.suffix}" if first.suffix else "one without an ending"
            raise InputError(explain(first, "a .parquet, .csv or .csv.gz file", got, "convert it"))
        if delimiter is not None and len(delimiter) != 1:
            raise InputError(explain("delimiter", "one character", repr(delimiter), "give for example ';' or $'\\t'"))
        line = _first_line(first) if self._is_csv else ""
        self._delimiter = delimiter or max(_DELIMITERS, key=line.count)  # the first of those that come equally often
        arrow = load_arrow()
        self._types: dict[str, Any] = dict.fromkeys(number_columns, arrow.float64())
        self._types |= dict.fromkeys(text_columns, arrow.string())
        with explained(first, _TABLE_FIX, line.split(self._delimiter)):
            self.schema = self._csv(first).schema if self._is_csv else self._parquet(first).schema_arrow
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

    def forecast_rows(self) -> int:
        """Number of rows: known for Parquet, guessed from the size for CSV."""
        if self._is_csv:
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
        held: list[Any] = []
        for file in self._files:
            with explained(file, _TABLE_FIX, self.schema.names):
                for batch in self._file_batches(file, columns, rows):
                    held.append(batch)
                    if sum(b.num_rows for b in held) >= rows or sum(b.nbytes for b in held) >= BATCH_BYTES:
                        yield from _joined(held)  # a CSV block may hold few rows, and long strings many bytes
                        held = []
        yield from _joined(held)

    def _file_batches(self, file: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
        if self._is_csv:
            yield from self._csv(file, list(columns))
            return
        wanted = load_arrow().schema([self.schema.field(name) for name in columns])
        for batch in self._parquet(file).iter_batches(min(rows, CHUNK_EDGES), columns=list(columns)):
            yield batch.select(list(columns)).cast(wanted)  # every file is read as the first one

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
                if found is None or not found.has_min_max or not isinstance(found.min, int):
                    return None
                ends += [found.min, found.max]
        return (min(ends), max(ends)) if ends else None


def _joined(batches: list[Any]) -> Iterator[Any]:
    if batches:
        table = load_arrow().Table.from_batches(batches).combine_chunks()
        yield from (batch for batch in table.to_batches() if batch.num_rows)


def csv_columns(path: Path, *, floats: bool = False) -> Iterator[list[Any]]:
    """The columns of a CSV file without a header row, gzipped or not, a block at a time; as floats if asked."""
    arrow = load_arrow()
    with explained(path, "download the set again"):
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
