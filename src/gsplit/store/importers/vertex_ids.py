"""Map the ids of a table, numbers or strings, to vertices 0 .. n-1.

The vertices are the distinct ids in ascending order. So the numbering depends on the set of ids only, and integers that
already are 0 .. n-1 do not change. The mapping is written into the store (``vertex_ids``, or ``name_offsets`` and
``name_bytes``), so that results can be joined with the tables.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import BATCH_BYTES, IdBounds, TableFile, load_arrow
from gsplit.store.source import VertexRange

__all__ = [
    "BATCH_IDS",
    "IdMode",
    "UnknownIds",
    "VertexIds",
    "check_spelling",
    "collect_ids",
    "dense_ids",
    "widened_alike",
]


class IdMode(StrEnum):
    """How ids become vertices: unchanged, numbered in order, or (CSV) read as text and numbered."""

    AUTO = "auto"
    DENSE = "dense"
    MAP = "map"
    NAMES = "names"


class UnknownIds(StrEnum):
    """How to handle an edge with an endpoint that is not a vertex."""

    REFUSE = "refuse"
    DROP = "drop"


_KINDS = {"int64": "integers", "large_string": "strings"}
BATCH_IDS = 1 << 23
"""Ids looked up in one call. Every call of pyarrow builds its hash table again, so there should be few."""
_NO_ID = 1 << 63
_MAX_SPAN = 4  # integers per vertex, up to which vertices are found in an array by their ids
_OTHER_SPELLING = r"^\s*([+]|-?0[0-9xX]|-0\s*$)"


@dataclass(frozen=True)
class VertexIds:
    """The vertices of a graph. ``values`` are their distinct ids in ascending order, None if those are 0 .. n-1."""

    num_vertices: int
    values: Any | None

    def lookup(self, where: str, ids: Any) -> Ids:
        """The vertices of a column of ids, -1 for an id that is not a vertex."""
        arrow = load_arrow()
        ids = _widened(ids)
        expected_type = arrow.int64() if self.values is None else self.values.type
        if ids.type != expected_type:
            fix = "use one kind of id in both tables; --ids names reads the ids of CSV files as text"
            kinds = [_KINDS[str(kind)] for kind in (expected_type, ids.type)]
            raise InputError(explain(where, f"ids that are {kinds[0]}, as in the vertex table", kinds[1], fix))
        if self.values is None:
            vertices: Ids = np.asarray(ids.fill_null(-1).to_numpy(zero_copy_only=False))
            missing = (vertices < 0) | (vertices >= self.num_vertices)
        elif self._by_id is not None:
            first, by_id = self._by_id
            positions = np.asarray(ids.fill_null(first).to_numpy(zero_copy_only=False)) - first
            missing = (positions < 0) | (positions >= by_id.size) | np.asarray(ids.is_null())
            vertices = by_id[np.where(missing, 0, positions)]
            missing |= vertices < 0
        else:
            found = arrow.compute.index_in(ids, value_set=self.values)
            vertices = np.asarray(found.cast(arrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
            missing = vertices < 0
        return np.where(missing, -1, vertices)

    @functools.cached_property
    def _by_id(self) -> tuple[int, Ids] | None:
        """The smallest id, and the vertex of every integer from there on, -1 for none.

        None for strings, and for integers too far apart for an array.
        """
        integers = self.as_integers()
        if integers is None or integers.size == 0:
            return None
        span = int(integers[-1]) - int(integers[0]) + 1
        if span > _MAX_SPAN * integers.size:
            return None
        by_id = np.full(span, -1, np.int64)
        by_id[integers - integers[0]] = np.arange(integers.size)
        return int(integers[0]), by_id

    def bounds(self, column: str, held: VertexRange) -> IdBounds | None:
        """Bounds of the ids of a range in a column of integers; None for strings, whose statistics may be truncated.

        An id between those of two vertices belongs to the first, so that every id is read for one range.
        """
        if self.values is None:
            return IdBounds(column, held.first, held.stop - 1, self.num_vertices - 1, held.counts_dangling_edges)
        if not load_arrow().types.is_integer(self.values.type):
            return None
        low = self._first_id_of(held.first)
        stop = self._first_id_of(held.stop)
        return IdBounds(column, low, stop - 1, _NO_ID, held.counts_dangling_edges)

    def _first_id_of(self, vertex: int) -> int:
        """The smallest id that belongs to a vertex; one past all ids for the vertex after the last."""
        assert self.values is not None
        if vertex == self.num_vertices:
            return _NO_ID
        return int(self.values[vertex].as_py()) if vertex else -_NO_ID

    def as_integers(self) -> Ids | None:
        """The mapping if ids are integers other than 0 .. n-1; else None."""
        arrow = load_arrow()
        if self.values is None or not arrow.types.is_integer(self.values.type):
            return None
        return np.asarray(self.values.to_numpy(zero_copy_only=False))

    def as_names(self) -> tuple[Ids, npt.NDArray[np.uint8]] | None:
        """The mapping if ids are strings, as offsets into one array of UTF-8 bytes; else None."""
        arrow = load_arrow()
        if self.values is None or arrow.types.is_integer(self.values.type):
            return None
        lengths = arrow.compute.binary_length(self.values).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        data = self.values.buffers()[2]
        text = np.frombuffer(data, np.uint8) if data is not None and offsets[-1] else np.empty(0, np.uint8)
        start = int(np.frombuffer(self.values.buffers()[1], np.int64)[self.values.offset]) if offsets[-1] else 0
        return offsets, text[start : start + int(offsets[-1])]


def dense_ids(num_vertices: int) -> VertexIds:
    """Ids 0 .. n-1, which need no mapping."""
    return VertexIds(num_vertices, None)


def check_spelling(table: TableFile, columns: Sequence[str], delimiter: str | None) -> None:
    """Refuse CSV ids such as 007 and 0x10, which would be read as integers but may be names.

    Reads the first rows only.
    """
    arrow = load_arrow()
    whole = [name for name in columns if arrow.types.is_integer(table.schema.field(name).type)]
    if not table.is_csv or not whole:
        return
    for batch in islice(TableFile(table.path, delimiter=delimiter, text_columns=whole).batches(whole, 1), 1):
        for name, column in zip(whole, batch.columns, strict=True):
            other = column.filter(arrow.compute.match_substring_regex(column, _OTHER_SPELLING))
            if len(other):
                got = f"{other[0].as_py()!r}, which would become another id as a number"
                fix = "read ids as text: --ids names"
                raise InputError(explain(f"{table.path}: {name}", "integers without leading zeros", got, fix))


def collect_ids(where: str, columns: Iterable[Any], *, unique: bool) -> VertexIds:
    """The distinct ids of some columns. With ``unique``, a repeated id is refused."""
    arrow = load_arrow()
    known: list[Any] = []
    count = 0
    for column in _gathered(columns):
        num_empty = column.null_count
        if not arrow.types.is_integer(column.type):
            num_empty += arrow.compute.sum(arrow.compute.equal(column, "")).as_py() or 0
        if num_empty:
            got = f"{num_empty} empty among {count + len(column)}"
            raise InputError(explain(where, "an id in every row", got, "drop or fill these rows"))
        count += len(column)
        known.append(arrow.compute.unique(_widened(column)))
        if sum(map(len, known)) >= 2 * len(known[0]):  # else each batch would cost as much as all ids
            known = [arrow.compute.unique(arrow.concat_arrays(known))]
    if not known:
        return dense_ids(0)
    values = arrow.compute.unique(arrow.concat_arrays(known))
    if unique and len(values) != count:
        got = f"{len(values)} distinct ids in {count} rows"
        fix = "drop rows so that each vertex has one; if 7 and 007 differ in your CSV file, use --ids names"
        raise InputError(explain(where, "every id once", got, fix))
    values = values.take(arrow.compute.sort_indices(values))
    if arrow.types.is_integer(values.type) and values[0].as_py() == 0 and values[-1].as_py() == len(values) - 1:
        return dense_ids(len(values))
    return VertexIds(len(values), values)


def _widened(column: Any) -> Any:
    """Cast integers to int64 and strings to 64-bit offsets, so that any two columns can be compared."""
    arrow = load_arrow()
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_integer(column.type):
        try:
            return column.cast(arrow.int64())
        except arrow.ArrowInvalid as error:
            raise InputError(explain("ids", "integers below 2**63", error, "map them to smaller ones")) from None
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        return column.cast(arrow.large_string())
    fix = "convert the id columns; --ids names reads those of CSV files as text"
    fix = "save the file in UTF-8" if arrow.types.is_binary(column.type) else fix
    raise InputError(explain("ids", "integers or strings", column.type, fix))


def widened_alike(where: str, columns: list[Any]) -> list[Any]:
    """Cast columns of ids to one type, so that they can be joined. Numbers and strings together are refused."""
    wide = [_widened(column) for column in columns]
    if len({str(column.type) for column in wide}) > 1:
        got = " and ".join(str(column.type) for column in columns)
        raise InputError(explain(where, "one kind of id for sources and destinations", got, "convert one of them"))
    return wide


def _gathered(columns: Iterable[Any]) -> Iterator[Any]:
    """Join columns of ids into fewer, larger ones."""
    arrow = load_arrow()
    held: list[Any] = []
    count = 0
    for column in columns:
        held.append(_widened(column))
        count += len(column)
        if count >= BATCH_IDS or sum(part.nbytes for part in held) >= BATCH_BYTES:
            yield arrow.concat_arrays(widened_alike("ids", held))
            held = []
            count = 0
    if held:
        yield arrow.concat_arrays(widened_alike("ids", held))
