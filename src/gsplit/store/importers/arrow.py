"""Parquet and CSV tables, read in pieces with pyarrow, and the names of their columns.

pyarrow is an optional dependency; only this module imports it. Its errors become ``InputError``.
"""

import functools
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.array_types import Array
from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.files.objects import ObjectFile, ObjectFolder, as_url
from gsplit.store.source import CHUNK_EDGES

__all__ = [
    "BATCH_BYTES",
    "IdBounds",
    "LabelType",
    "TableFile",
    "TableColumns",
    "explained",
    "flat_lists",
    "guess_column",
    "is_pattern",
    "list_rows",
    "load_arrow",
    "match_columns",
    "number_column",
]

BATCH_BYTES = 64 << 20
_CSV_ROW_BYTES = 16  # an estimate for the progress bar only
_CSV_COLUMN = re.compile(r"In CSV column #(\d+)")
_DELIMITERS = ",;\t|"
_LINE_BYTES = 1 << 20
_TABLE_FIX = (
    "check the file; a CSV file needs a header row, the right --delimiter and one type per column "
    "(--ids names reads ids as text; an empty cell is a missing number)"
)
_EDGE_LIST_FIX = "check the file: comments first, then two integers in every line, one tab or space between them"
_OTHER_NAMES = {
    "--src": ("src", "source", "from", "src_id", "source_id", "start", "head", "u", "citing"),
    "--dst": ("dst", "target", "to", "dst_id", "target_id", "destination", "end", "tail", "v", "cited"),
    "--id-column": ("id", "node_id", "vertex_id", "node", "vertex", "name", "key"),
    "--label-column": ("y", "label", "labels", "class", "category", "target"),
    "--split-column": ("split", "set", "subset", "fold", "partition", "part"),
}


class LabelType(StrEnum):
    """How to read labels: by their type, as classes (also whole floats), or as values (also integers)."""

    AUTO = "auto"
    CLASSES = "classes"
    VALUES = "values"


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns of a graph's tables. ``features`` are number columns, or patterns such as ``f*``."""

    src: str = "src"
    dst: str = "dst"
    edge_values: Sequence[str] = ()
    id: str = "id"
    label: str = "y"
    split: str = "split"
    feature_list: str = "x"
    features: Sequence[str] = field(default_factory=tuple)
    label_type: LabelType = LabelType.AUTO


def guess_column(wanted: str, option: str, names: Sequence[str]) -> str | None:
    """The most likely column for a missing one: with a similar spelling, or with another usual name.

    >>> guess_column("src", "--src", ["source", "target"]), guess_column("y", "--label-column", ["id", "Label"])
    ('source', 'Label')
    >>> guess_column("split", "--split-column", ["id", "x0"]) is None
    True
    """
    plain = {name.strip().lower(): name for name in names}
    for other in (wanted.strip().lower(), *_OTHER_NAMES.get(option, ())):
        if other in plain:
            return plain[other]
    close = get_close_matches(wanted.lower(), plain, 1, cutoff=0.6)
    return plain[close[0]] if close else None


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern for several columns."""
    return any(sign in name for sign in "*?[")


def match_columns(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that match names and patterns, each once, in the order of the patterns and then of the table.

    >>> match_columns(["f*", "age"], ["id", "f1", "f0", "age"])
    ['f1', 'f0', 'age']
    """
    found: list[str] = []
    for pattern in patterns:
        if pattern in names or not is_pattern(pattern):
            matched = [pattern]
        else:
            matched = [name for name in names if fnmatchcase(name, pattern)]
        found += [name for name in matched if name not in found]
    return found


def load_arrow() -> Any:
    """Import pyarrow, or raise an error with the command that installs it."""
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
    """Turn errors of pyarrow into ``InputError``. ``columns`` replace the column numbers in its messages."""
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


class _TablesOnObjects:
    """A table on object storage: one object, or all below a URL but marker files."""

    def __init__(self, url: str) -> None:
        self._root = Path(url).parent
        self._folder = ObjectFolder(url.rpartition("/")[0])
        single = self._folder.stat(Path(url).name)
        found = {} if single is None else {Path(url).name: single}
        if single is None:
            self._root = Path(url)
            self._folder = ObjectFolder(url)
            found = self._folder.list_below()
        shown = {name for name in found if not name.rpartition("/")[2].startswith((".", "_"))}
        self.stats = {self._root / name: found[name] for name in sorted(shown)}
        self.files = list(self.stats)

    def open(self, file: Path) -> ObjectFile:
        """An object as a file."""
        return ObjectFile(self._folder, file.relative_to(self._root).as_posix())


def _packing(file: Path) -> dict[str, str | None]:
    """How an object is packed, by its name; pyarrow detects it for paths only."""
    return {"compression": "gzip" if file.name.endswith(".gz") else None}


@dataclass(frozen=True)
class IdBounds:
    """Bounds of the ids of a range of vertices in a column: ``low`` to ``high``, both included.

    With ``dangling``, ids that are below 0, above ``largest`` or missing count as well.
    """

    column: str
    low: int
    high: int
    largest: int
    dangling: bool

    def may_be_in(self, found: Any) -> bool:
        """Whether a row group with these statistics of the column may contain such an id."""
        if found is None or not found.has_min_max or not isinstance(found.min, int):
            return True
        unknown = not found.has_null_count or found.null_count or found.min < 0 or found.max > self.largest
        if self.dangling and unknown:
            return True
        return bool(found.min <= self.high and found.max >= self.low)


class TableFile:
    """A Parquet or CSV table in one file or in a folder of files, read a bounded number of rows at a time."""

    def __init__(
        self,
        path: str | Path,
        *,
        delimiter: str | None = None,
        text_columns: Sequence[str] = (),
        number_columns: Sequence[str] = (),
        integer_columns: Sequence[str] = (),
    ) -> None:
        """In CSV, ``text_columns`` are read as text and ``number_columns`` as floats, whatever the first rows hold.

        ``integer_columns`` are all columns of an edge list: CSV files without a header row, of integers, whose first
        lines may be comments that begin with ``#``.
        """
        self.path = Path(path)
        self._objects = None if (url := as_url(path)) is None else _TablesOnObjects(url)
        files = [self.path]
        if self._objects is not None:
            files = self._objects.files
        elif self.path.is_dir():  # as Spark and others write them, with marker files beside the data
            files = sorted(p for p in self.path.rglob("*") if p.is_file() and not p.name.startswith((".", "_")))
            outside = [p for p in files if not p.resolve().is_relative_to(self.path.resolve())]
            if outside:
                got = f"{outside[0].name}, a link that leads out of it"
                raise InputError(explain(self.path, "a folder of tables", got, "put the file itself there"))
        self._files = files
        if not self._files or not (self._objects or self._files[0].is_file()):
            got = "a folder without files" if self.path.is_dir() else "no such file"
            raise InputError(explain(self.path, "a table, or a folder of them", got, "check the path"))
        first = self._files[0]
        self.is_csv = not first.name.endswith((".parquet", ".pq"))
        if self.is_csv and not first.name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
            raise InputError(explain(first, "a .parquet, .csv or .csv.gz file", first.name, "convert it"))
        if delimiter is not None and len(delimiter) != 1:
            raise InputError(explain("delimiter", "one character", repr(delimiter), "give for example ';' or $'\\t'"))
        self._header = list(integer_columns)
        self._fix = _EDGE_LIST_FIX if integer_columns else _TABLE_FIX
        line = self._first_line(first)[1] if self.is_csv else ""
        signs = _DELIMITERS + " " if integer_columns else _DELIMITERS
        self._delimiter = delimiter or max(signs, key=line.count)  # the first of several equally frequent ones
        arrow = load_arrow()
        self._types: dict[str, Any] = dict.fromkeys(number_columns, arrow.float64())
        self._types |= dict.fromkeys(text_columns, arrow.string()) | dict.fromkeys(integer_columns, arrow.int64())
        with explained(first, self._fix, self._header or line.split(self._delimiter)):
            self.schema = self._csv(first).schema if self.is_csv else self._parquet(first).schema_arrow
            names = list(self.schema.names)
        if len(set(names)) != len(names):
            raise InputError(explain(first, "every column name once", names, "rename the columns"))
        self._types = {field.name: field.type for field in self.schema}  # every file is read as the first one

    def _opened(self, file: Path) -> Any:
        """What pyarrow reads a file from: its path, or an object."""
        return file if self._objects is None else self._objects.open(file)

    def _stat(self, file: Path) -> tuple[int, float]:
        """Bytes and time of the last change."""
        if self._objects is not None:
            return self._objects.stats[file]
        found = file.stat()
        return found.st_size, found.st_mtime

    def _first_line(self, file: Path) -> tuple[int, str]:
        """The first line of a CSV file, gzipped or not, and the number of comments before it in an edge list."""
        with explained(file, self._fix), load_arrow().input_stream(self._opened(file), **_packing(file)) as stream:
            lines = stream.read(_LINE_BYTES).split(b"\n")
        comments = sum(1 for _ in takewhile(lambda line: line.startswith(b"#"), lines)) if self._header else 0
        return comments, (lines[comments:] or [b""])[0].decode("utf-8", "replace").strip("\ufeff\r")

    def _parquet(self, file: Path) -> Any:
        # a buffer instead of whole column chunks: a row group may be as large as the file
        return load_arrow().parquet.ParquetFile(self._opened(file), buffer_size=1 << 20, pre_buffer=False)

    def _csv(self, file: Path, columns: Sequence[str] | None = None) -> Any:
        csv = load_arrow().csv
        source = self._opened(file)
        return csv.open_csv(
            source if source is file else load_arrow().input_stream(source, **_packing(file)),
            read_options=csv.ReadOptions(
                block_size=4 << 20,
                column_names=self._header or None,
                skip_rows=self._first_line(file)[0] if self._header else 0,
            ),
            parse_options=csv.ParseOptions(delimiter=self._delimiter),
            convert_options=csv.ConvertOptions(column_types=self._types, include_columns=columns),
        )

    def identity(self) -> str:
        """A checksum of the names and sizes of the files."""
        is_file = self._files == [self.path]
        folder = self.path.parent if is_file else self.path
        lines = [f"{file.relative_to(folder)} {self._stat(file)[0]}" for file in self._files]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def modified(self) -> float:
        """Time of the last change of a file, in seconds as in ``stat``."""
        return max(self._stat(file)[1] for file in self._files)

    def forecast_rows(self) -> int:
        """Number of rows: exact for Parquet, estimated from the size for CSV."""
        if self.is_csv:
            return sum(self._stat(file)[0] for file in self._files) // _CSV_ROW_BYTES
        return sum(num_rows for _, num_rows in self._sizes)

    def require(self, columns: Mapping[str, str]) -> None:
        """Refuse a table without these columns. The values are the command line options that name them."""
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

    @functools.cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """Row groups and rows of each Parquet file."""
        found = (self._parquet(file).metadata for file in self._files)
        return [(metadata.num_row_groups, metadata.num_rows) for metadata in found]

    def num_row_groups(self) -> int:
        """Number of row groups of all Parquet files."""
        return sum(groups for groups, _ in self._sizes)

    def count_near(self, near: Sequence[IdBounds]) -> int:
        """Number of row groups that may have an id in ``near``."""
        opened = map(self._parquet, self._files)
        return sum(_may_be_in(file, group, near) for file in opened for group in range(file.num_row_groups))

    def numbered_batches(
        self, columns: Sequence[str], rows: int, near: Sequence[IdBounds] = (), row_groups: range | None = None
    ) -> Iterator[tuple[int, Any]]:
        """As ``batches``, each with the number of its first row, without row groups that have no ids in ``near``.

        ``row_groups``: only those with these numbers, counted over all files.
        """
        held: list[Any] = []
        row = 0  # of the table, after the rows held
        first_group = 0
        for number, file in enumerate(self._files):
            with explained(file, self._fix, self.schema.names):
                own = None
                if row_groups is not None:
                    groups, num_rows = self._sizes[number]
                    own = range(max(0, row_groups.start - first_group), min(groups, row_groups.stop - first_group))
                    first_group += groups
                    if not own:
                        yield from _joined(row, held)
                        held = []
                        row += num_rows
                        continue
                for skipped, batch in self._file_batches(file, columns, rows, near, own):
                    if skipped:
                        yield from _joined(row, held)
                        held = []
                        row += skipped
                    held.append(batch)
                    row += batch.num_rows
                    if sum(b.num_rows for b in held) >= rows or sum(b.nbytes for b in held) >= BATCH_BYTES:
                        yield from _joined(row, held)  # a CSV block may hold few rows, and long strings many bytes
                        held = []
        yield from _joined(row, held)

    def _file_batches(
        self, file: Path, columns: Sequence[str], rows: int, near: Sequence[IdBounds], own: range | None
    ) -> Iterator[tuple[int, Any]]:
        """Batches with the number of rows skipped before each. The last may be empty. ``own``: only these groups."""
        if self.is_csv:
            yield from ((0, batch) for batch in self._csv(file, list(columns)))
            return
        arrow = load_arrow()
        opened = self._parquet(file)
        skipped = 0
        wanted = arrow.schema([self.schema.field(name) for name in columns])

        def is_needed(group: int) -> bool:
            return (own is None or group in own) and _may_be_in(opened, group, near)

        for needed, groups in groupby(range(opened.metadata.num_row_groups), is_needed):
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
        """Smallest and largest value of a Parquet column from its statistics; None without them."""
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
    """The statistics of a column in a row group of a Parquet file; None without them."""
    chunks = (opened.metadata.row_group(group).column(c) for c in range(opened.metadata.num_columns))
    return next((c.statistics for c in chunks if c.path_in_schema == column), None)


def _may_be_in(opened: Any, group: int, near: Sequence[IdBounds]) -> bool:
    return not near or any(bounds.may_be_in(_statistics(opened, group, bounds.column)) for bounds in near)


def _joined(stop_row: int, batches: list[Any]) -> Iterator[tuple[int, Any]]:
    """Join batches, and number their first rows. ``stop_row`` follows the last row."""
    if batches:
        table = load_arrow().Table.from_batches(batches).combine_chunks()
        row = stop_row - table.num_rows
        for batch in table.to_batches():
            if batch.num_rows:
                yield row, batch
            row += batch.num_rows


def number_column(where: str, column: Any) -> Array:
    """A numeric column as a numpy array. Nulls become NaN in floats and are refused in integers."""
    arrow = load_arrow()
    kind = column.type
    numeric = arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)
    if not numeric or (column.null_count and not arrow.types.is_floating(kind)):
        got = f"{kind} with {column.null_count} nulls"
        raise InputError(explain(where, "numbers without nulls", got, "convert or fill the column"))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def list_rows(where: str, column: Any) -> Array:
    """A column of equally long lists of numbers as a matrix."""
    flat, width = flat_lists(where, column)
    return number_column(where, flat).reshape(len(column), width)


def flat_lists(where: str, column: Any) -> tuple[Any, int]:
    """The elements of a column of equally long lists, and that length."""
    arrow = load_arrow()
    if not (
        arrow.types.is_list(column.type)
        or arrow.types.is_large_list(column.type)
        or arrow.types.is_fixed_size_list(column.type)
    ):
        fix = "make it a column of lists; number columns become features with --feature-column"
        raise InputError(explain(where, "lists of numbers or ids", column.type, fix))
    flat = column.flatten()
    if arrow.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        lengths = arrow.compute.unique(arrow.compute.list_value_length(column))
        width = lengths[0].as_py() if len(lengths) == 1 else None
    if width is None or column.null_count or len(flat) != width * len(column):
        ends = arrow.compute.min_max(arrow.compute.list_value_length(column)).as_py()
        got = f"{column.null_count} missing, lengths {ends['min']}..{ends['max']} in {len(column)} rows"
        raise InputError(explain(where, "lists of one length without nulls", got, "pad or fill the lists"))
    return flat, width
