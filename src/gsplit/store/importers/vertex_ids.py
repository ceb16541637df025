"""From the ids of a table, numbers or strings, to vertices 0 .. n-1.

The rule is one: the vertices are the distinct ids in ascending order. So the numbering depends on the set of
ids only, and integers that already are 0 .. n-1 stay as they are. The mapping is written into the store
(``vertex_ids``, or ``name_offsets`` and ``name_bytes``), so that results can be joined back.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import BATCH_BYTES, IdBounds, Table, load_arrow
from gsplit.store.source import VertexRange

__all__ = ["IdMode", "UnknownIds", "VertexIds", "check_spelling", "collect_ids", "dense_ids", "widened_alike"]


class IdMode(StrEnum):
    """How ids become vertices: taken as they are, numbered in order, or (CSV) read as text and numbered."""

    AUTO = "auto"
    DENSE = "dense"
    MAP = "map"
    NAMES = "names"


class UnknownIds(StrEnum):
    """What to do with an edge one of whose ends is no vertex."""

    REFUSE = "refuse"
    DROP = "drop"


_KINDS = {"int64": "integers", "large_string": "strings"}
BATCH_IDS = 1 << 23
"""Ids looked up in one call: pyarrow builds its hash table anew each time, so calls should be few."""


_NO_ID = 1 << 63
_OTHER_SPELLING = r"^\s*([+]|-?0[0-9xX]|-0\s*$)"


@dataclass(frozen=True)
class VertexIds:
    """The vertices of a graph: ``values`` holds their distinct ids in ascending order, None if they are 0 .. n-1."""

    num_vertices: int
    values: Any | None

    def lookup(self, where: str, ids: Any) -> npt.NDArray[np.int64]:
        """The vertices of a column of ids, -1 for an id that is no vertex."""
        arrow = load_arrow()
        ids = _widened(ids)
        expected_type = arrow.int64() if self.values is None else self.values.type
        if ids.type != expected_type:
            fix = "use one kind of id in both tables; --ids names reads the ids of CSV files as text"
            kinds = [_KINDS[str(kind)] for kind in (expected_type, ids.type)]
            raise InputError(explain(where, f"ids that are {kinds[0]}, as in the vertex table", kinds[1], fix))
        if self.values is None:
            column = ids
            vertices: npt.NDArray[np.int64] = np.asarray(column.fill_null(-1).to_numpy(zero_copy_only=False))
            missing = (vertices < 0) | (vertices >= self.num_vertices)
        else:
            found = arrow.compute.index_in(ids, value_set=self.values)
            vertices = np.asarray(found.cast(arrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
            missing = vertices < 0
        return np.where(missing, -1, vertices)

    def bounds(self, column: str, held: VertexRange) -> IdBounds | None:
        """Where the ids of some vertices lie in a column of integers; None for strings, whose statistics may be cut.

        Ids between those of two vertices are taken to be the first one's, so that every id has a range to be read for.
        """
        if self.values is None:
            return IdBounds(column, held.first, held.stop - 1, self.num_vertices - 1, held.counts_strays)
        if not load_arrow().types.is_integer(self.values.type):
            return None
        low, stop = (self._first_id_of(vertex) for vertex in (held.first, held.stop))
        return IdBounds(column, low, stop - 1, _NO_ID, held.counts_strays)

    def _first_id_of(self, vertex: int) -> int:
        """The smallest id that is taken to be a vertex's; one past all ids for the vertex after the last."""
        assert self.values is not None
        if vertex == self.num_vertices:
            return _NO_ID
        return int(self.values[vertex].as_py()) if vertex else -_NO_ID

    def as_integers(self) -> npt.NDArray[np.int64] | None:
        """The mapping, where ids are numbers and not 0 .. n-1."""
        arrow = load_arrow()
        if self.values is None or not arrow.types.is_integer(self.values.type):
            return None
        return np.asarray(self.values.to_numpy(zero_copy_only=False))

    def as_names(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None:
        """The mapping, where ids are strings: offsets into one array of UTF-8 bytes."""
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
    """Ids that are vertices already."""
    return VertexIds(num_vertices, None)


def check_spelling(table: Table, columns: Sequence[str], delimiter: str | None) -> None:
    """Refuse CSV ids that would be read as integers but are written otherwise, such as 007 and 0x10: maybe names.

    Looks at the first rows only.
    """
    arrow = load_arrow()
    whole = [name for name in columns if arrow.types.is_integer(table.schema.field(name).type)]
    if not table.is_csv or not whole:
        return
    for batch in islice(Table(table.path, delimiter=delimiter, text_columns=whole).batches(whole, 1), 1):
        for name, column in zip(whole, batch.columns, strict=True):
            other = column.filter(arrow.compute.match_substring_regex(column, _OTHER_SPELLING))
            if len(other):
                got = f"{other[0].as_py()!r}, which would become another id as a number"
                fix = "read ids as they are written: --ids names"
                raise InputError(explain(f"{table.path}: {name}", "integers without leading zeros", got, fix))


def collect_ids(where: str, columns: Iterable[Any], *, unique: bool) -> VertexIds:
    """The distinct ids of some columns; with ``unique``, one that comes twice is refused."""
    arrow = load_arrow()
    known: Any | None = None
    count = 0
    for column in _gathered(columns):
        num_empty = column.null_count
        if not arrow.types.is_integer(column.type):
            num_empty += arrow.compute.sum(arrow.compute.equal(column, "")).as_py() or 0
        if num_empty:
            got = f"{num_empty} empty among {count + len(column)}"
            raise InputError(explain(where, "an id in every row", got, "drop or fill these rows"))
        count += len(column)
        values = arrow.compute.unique(_widened(column))
        known = values if known is None else arrow.compute.unique(arrow.concat_arrays([known, values]))
    if known is None:
        return dense_ids(0)
    if unique and len(known) != count:
        got = f"{len(known)} distinct ids in {count} rows"
        fix = "drop rows so that each vertex has one; if 7 and 007 differ in your CSV file, use --ids names"
        raise InputError(explain(where, "every id once", got, fix))
    known = known.take(arrow.compute.sort_indices(known))
    if arrow.types.is_integer(known.type) and known[0].as_py() == 0 and known[-1].as_py() == len(known) - 1:
        return dense_ids(len(known))
    return VertexIds(len(known), known)


def _widened(column: Any) -> Any:
    """Integers as int64, strings with 64-bit offsets, so that any two columns compare."""
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
    """Columns of ids as one type, so that they can be joined; numbers and strings do not mix."""
    wide = [_widened(column) for column in columns]
    if len({str(column.type) for column in wide}) > 1:
        got = " and ".join(str(column.type) for column in columns)
        raise InputError(explain(where, "one kind of id for sources and destinations", got, "convert one of them"))
    return wide


def _gathered(columns: Iterable[Any]) -> Iterator[Any]:
    """The same ids in fewer, larger arrays."""
    arrow = load_arrow()
    held: list[Any] = []
    count = 0
    for column in columns:
        held.append(_widened(column))
        count += len(column)
        if count >= BATCH_IDS or sum(part.nbytes for part in held) >= BATCH_BYTES:
            yield arrow.concat_arrays(widened_alike("ids", held))
            held, count = [], 0
    if held:
        yield arrow.concat_arrays(widened_alike("ids", held))
