"""The hot cache: the hottest rows of a rank in memory, above a slower source.

Partitioning sorts the vertices of a part by hotness: how often presampling loaded them. So the hottest rows of a rank
are a prefix of each of its parts. A table of a few numbers per part converts ids to positions in the order [cached
prefixes | all other rows], without a map of the vertices (law 6). A row is cached if its position is smaller than the
number of cached rows.

Example: two parts, vertices 0..3 and 4..9. The first row of the first part and two rows of the second are cached.

    id         0 | 1 2 3   4 5 | 6 7 8 9
    position   0 | 3 4 5   1 2 | 6 7 8 9

The counts of presampling also predict the share of rows that a cache will have (``expected_hit_rate``).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.features.protocol import HostSource, RowSource, RowsRead
from gsplit.features.sources import check_ids, kernel_places, read_to_device
from gsplit.kernels.jit import kernel
from gsplit.kernels.rows import copy_cached, flat_rows
from gsplit.store.files import storage_dtype
from gsplit.store.protocol import GraphStore

__all__ = [
    "cached_order",
    "hotness_of",
    "stored_row_bytes",
    "CachedRows",
    "HotOrder",
    "clip_parts",
    "expected_hit_rate",
    "fill_in_order",
    "hottest_prefixes",
    "typed_hotness",
    "typed_orders",
]

_PIECE = 1 << 20
_FILL_BYTES = 16 << 20


@dataclass(frozen=True)
class HotOrder:
    """The order of a rank's vertices with the cached ones first.

    ``part_boundaries``: the first vertex of each of the rank's parts, and one past its last vertex.
    ``cached_per_part``: how many of the first vertices of each part are cached.

    >>> HotOrder((0, 4, 10), (1, 2)).positions(np.array([0, 1, 4, 6])).tolist()
    [0, 3, 1, 6]
    """

    part_boundaries: tuple[int, ...]
    cached_per_part: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [stop - start for start, stop in pairwise(self.part_boundaries)]
        assert len(sizes) == len(self.cached_per_part), (self.part_boundaries, self.cached_per_part)
        assert all(0 <= cached <= size for cached, size in zip(self.cached_per_part, sizes, strict=True)), sizes

    @property
    def first_id(self) -> int:
        """The first vertex of the rank."""
        return self.part_boundaries[0]

    @property
    def num_vertices(self) -> int:
        """The number of vertices of the rank."""
        return self.part_boundaries[-1] - self.part_boundaries[0]

    @cached_property
    def num_cached(self) -> int:
        """The number of cached vertices, which have smaller positions than this."""
        return sum(self.cached_per_part)

    @cached_property
    def _tables(self) -> tuple[Ids, Ids, Ids, Ids]:
        """Per part: first id, number of cached rows, and position minus id for cached and for other rows."""
        starts = np.array(self.part_boundaries[:-1], np.int64)
        cached = np.array(self.cached_per_part, np.int64)
        hot = np.cumsum(cached) - cached - starts
        cold = self.num_cached - np.cumsum(cached) - self.first_id
        return starts, cached, hot, cold

    def positions(self, ids: Ids) -> Ids:
        """The positions of vertices of the rank. That of a cached vertex is its row in the cache."""
        check_ids("vertices", ids, self.first_id, self.num_vertices)
        out = np.empty(ids.size, np.int64)
        starts, cached, hot, cold = self._tables
        _positions(ids, starts, cached, hot, cold, out)
        return out

    def positions_on_device(self, ids: Tensor) -> Tensor:
        """``positions`` of ids on a device, which a sampler has made: they are not checked."""
        starts, cached, hot, cold = _tables_on_device(self, ids.device)
        parts = torch.searchsorted(starts, ids, right=True) - 1
        return ids + torch.where(ids - starts[parts] < cached[parts], hot[parts], cold[parts])

    def ids(self, start: int, stop: int) -> Ids:
        """The vertices at the positions ``start .. stop - 1``.

        >>> HotOrder((0, 4, 10), (1, 2)).ids(1, 7).tolist()
        [4, 5, 1, 2, 3, 6]
        """
        _, cached, hot, cold = self._tables
        sizes = np.diff(self.part_boundaries)
        ends = np.cumsum(
            np.concatenate([cached, sizes - cached])
        )  # of the cached rows of every part, then of the others
        places = np.arange(start, stop)
        pieces = np.searchsorted(ends, places, side="right")
        ids: Ids = places - np.concatenate([hot, cold])[pieces]
        return ids


@lru_cache(maxsize=64)
def _tables_on_device(order: HotOrder, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(table).to(device) for table in order._tables)


@kernel
def _positions(ids: Ids, starts: Ids, cached: Ids, hot: Ids, cold: Ids, out: Ids) -> None:
    for i in range(ids.size):
        low = 0
        high = starts.size
        while high - low > 1:  # bisection of the last part that starts at or before the vertex; parts may be empty
            middle = (low + high) // 2
            if starts[middle] <= ids[i]:
                low = middle
            else:
                high = middle
        out[i] = ids[i] + (hot[low] if ids[i] - starts[low] < cached[low] else cold[low])


def clip_parts(part_boundaries: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
    """The boundaries of the parts in a range of vertices, which may start or end inside a part.

    >>> clip_parts([0, 4, 6, 9], 2, 6), clip_parts([0, 4], 0, 4)
    ((2, 4, 6), (0, 4))
    """
    return (first, *(cut for cut in part_boundaries if first < cut < stop), stop)


def hottest_prefixes(hotness: npt.NDArray[Any], part_boundaries: Sequence[int], num_rows: int) -> tuple[int, ...]:
    """The lengths of the prefixes of all parts that together are the ``num_rows`` hottest rows.

    ``hotness`` is that of the vertices from the first boundary to the last; it falls within each part. Among rows of
    equal hotness those of earlier parts are taken. Reads only a few elements of ``hotness``, which may be a memory map.

    >>> hottest_prefixes(np.array([9, 3, 1, 7, 3, 3]), [0, 3, 6], 4)
    (2, 2)
    """
    first = part_boundaries[0]
    parts = [hotness[start - first : stop - first] for start, stop in pairwise(part_boundaries)]
    if num_rows >= hotness.size:
        return tuple(part.size for part in parts)

    def at_least(value: int) -> list[int]:
        return [bisect_right(part, -value, key=lambda found: -int(found)) for part in parts]

    low = 0
    high = 1 + max((int(part[0]) for part in parts if part.size), default=0)
    while low < high:  # bisection of the smallest threshold that not too many rows reach
        middle = (low + high) // 2
        if sum(at_least(middle)) <= num_rows:
            high = middle
        else:
            low = middle + 1
    taken = at_least(low)
    room = num_rows - sum(taken)
    for part, equals in enumerate(at_least(low - 1)):
        more = max(0, min(room, equals - taken[part]))
        taken[part] += more
        room -= more
    return tuple(taken)


def expected_hit_rate(hotness: npt.NDArray[Any], order: HotOrder) -> float:
    """The share of input rows that will be in the cache, predicted by presampling; 0 if presampling loaded none.

    >>> expected_hit_rate(np.array([6, 1, 2, 1]), HotOrder((0, 2, 4), (1, 1)))
    0.8
    """
    cached = 0
    total = 0
    for (start, stop), taken in zip(pairwise(order.part_boundaries), order.cached_per_part, strict=True):
        part = hotness[start - order.first_id : stop - order.first_id]
        for at in range(0, part.size, _PIECE):
            piece = part[at : at + _PIECE]
            total += int(piece.sum())
            cached += int(piece[: max(0, taken - at)].sum())
    return cached / total if total else 0.0


def fill_in_order(source: HostSource, order: HotOrder, out: Tensor) -> None:
    """Read the first rows of an order, as many as ``out`` has, piece by piece."""
    step = max(1, _FILL_BYTES // max(1, out[:1].nbytes))
    for start in range(0, out.size(0), step):
        stop = min(start + step, out.size(0))
        source.place(order.ids(start, stop), None, out[start:stop])


class CachedRows:
    """A cache of the first rows of ``order`` above ``source``, from which the others are read (``HostSource``).

    ``held``: these rows, if they are in memory or in a mapped file already.
    """

    def __init__(self, source: HostSource, order: HotOrder, held: Tensor | None = None) -> None:
        self._source = source
        self._order = order
        self.row_shape = source.row_shape
        self.dtype = source.dtype
        if held is None:
            held = torch.empty(order.num_cached, *source.row_shape, dtype=source.dtype)
            fill_in_order(source, order, held)
        self._bits = np.dtype(f"u{held.element_size()}")
        self._columns = held[:1].numel() if order.num_cached else 0
        self._held = flat_rows(held, self._bits)[0].reshape(order.num_cached, self._columns)
        self._row_bytes = self._columns * held.element_size()

    @property
    def num_bytes(self) -> int:
        """The memory of the cached rows."""
        return self._held.nbytes

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        positions = self._order.positions(ids)
        missed = np.empty(ids.size, np.int64)
        flat, stride = flat_rows(out, self._bits)
        num_missed = copy_cached(self._held, positions, kernel_places(places), flat, stride, missed)
        missed = missed[:num_missed]
        rest = self._source.place(ids[missed], missed if places is None else places[missed], out)
        hits = ids.size - num_missed
        return RowsRead(rows=ids.size, num_bytes=rest.num_bytes + hits * self._row_bytes, hits=rest.hits + hits)


def cached_order(
    store: GraphStore, first: int, stop: int, features: Sequence[str | RowSource], cache_bytes: int
) -> HotOrder:
    """The order of the vertices ``first .. stop - 1`` for a cache of this size. Reads a few numbers only."""
    boundaries = clip_parts(store.part_boundaries, first, stop)
    num_rows = cache_bytes // max(1, stored_row_bytes(store, features))
    return HotOrder(boundaries, hottest_prefixes(hotness_of(store, first, stop), boundaries, num_rows))


def typed_orders(
    store: GraphStore, first: int, stop: int, features: Mapping[str, Sequence[str]], cache_bytes: int
) -> dict[str, HotOrder]:
    """The cached rows of every vertex type with features, among the vertices ``first .. stop - 1``, by row in the type.

    They are those that presampling loaded most often per byte, over all types.
    """
    parts = {name: typed_hotness(store, first, stop, name) for name in features}  # hotness falls within a part
    row_bytes = {name: max(1, stored_row_bytes(store, names)) for name, names in features.items()}

    def lengths(least: float) -> dict[str, tuple[int, ...]]:
        """The rows of every part with at least this hotness per byte."""
        return {
            name: tuple(bisect_right(part, -least * row_bytes[name], key=lambda found: -int(found)) for part in found)
            for name, found in parts.items()
        }

    def fits(least: float) -> bool:
        return sum(sum(found) * row_bytes[name] for name, found in lengths(least).items()) <= cache_bytes

    low = 0.0
    high = 0.0 if fits(0.0) else 1.0 + max((int(part[0]) for found in parts.values() for part in found), default=0)
    for _ in range(64 if high else 0):  # bisection of the smallest threshold whose rows fit
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    taken = lengths(high)
    orders = {}
    assert store.types is not None
    for name, found in parts.items():
        first_row = store.types.row_range(name, first, stop)[0]
        sizes = [part.size for part in found] or [0]
        orders[name] = HotOrder(tuple(accumulate(sizes, initial=first_row)), taken[name] or (0,))
    return orders


def typed_hotness(store: GraphStore, first: int, stop: int, vertex_type: str) -> list[Array]:
    """How often presampling loaded the vertices of a type among ``first .. stop - 1``, part by part."""
    assert store.types is not None
    hotness = hotness_of(store, first, stop)
    ranges = [(max(low, first) - first, min(high, stop) - first) for low, high in store.types.ranges(vertex_type)]
    return [hotness[low:high] for low, high in ranges if low < high]


def hotness_of(store: GraphStore, first: int, stop: int) -> Array:
    """How often presampling loaded the vertices ``first .. stop - 1``."""
    low = store.vertex_range[0]
    return store.stored_array("hotness")[first - low : stop - low]


def stored_row_bytes(store: GraphStore, features: Sequence[str | RowSource]) -> int:
    """The bytes of the rows of one vertex, as they are stored or as a user-defined source returns them."""
    own = [found for found in features if not isinstance(found, str)]
    names = [f"features/{name}" for name in features if isinstance(name, str)]
    stored = sum(prod(store.shape(name)[1:]) * storage_dtype(store.dtype(name)).itemsize for name in names)
    return stored + sum(prod(source.row_shape) * source.dtype.itemsize for source in own)
