"""Where the rows and edges of a step are, and where and when its mini-batch is made.

A rank on the host maps the store, and may have a cache above files on disk. A rank on a device gets its rows from the
device's cache, or reads them from the host's memory over the bus; its mini-batches are sampled on the host, ahead of
training, or on the device, which then holds the edges that the rank samples: its own under ``split``, all of them under
``data``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gsplit.array_types import Array
from gsplit.features.cache import (
    HotOrder,
    cached_order,
    expected_hit_rate,
    hotness_of,
    stored_row_bytes,
    typed_hotness,
    typed_orders,
)
from gsplit.graph.ownership import Ownership
from gsplit.graph.types import GraphTypes
from gsplit.minibatch.strategy_names import StrategySpec
from gsplit.planner.disk import DiskReads
from gsplit.planner.hardware import Hardware
from gsplit.store.reader import Store

__all__ = ["DEFAULT_LOADING", "GraphSize", "Loading", "Placement", "StoredRows", "place_rank", "rows_by_type"]

_RESERVED_BYTES = 8e9
"""Memory of a device that an automatic cache leaves free, as the loader does."""
_DEFAULT_PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Loading:
    """Arguments of ``NeighborLoader`` that decide how long mini-batches take. The defaults are the loader's.

    ``cache_bytes``: of the host's memory, for every rank. ``copies``: ranks have copies of other ranks' rows.
    ``device_cache_bytes``: None for what a device has free less 8 GB. ``prefetch``: None for 2 on devices, else 0. Only
    devices have the others of the last four.
    """

    on_disk: bool = False
    cache_bytes: int = 0
    copies: bool = False
    device_cache_bytes: int | None = None
    prefetch: int | None = None
    sampling_threads: int = 1
    samples_on_device: bool = False


DEFAULT_LOADING = Loading()


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A stored graph. ``edge_bytes``: one entry of ``indices``; ``feature_bytes``: stored features of all vertices."""

    num_vertices: int
    num_edges: int
    edge_bytes: int
    feature_bytes: int

    @property
    def graph_bytes(self) -> int:
        """Bytes of offsets and sources."""
        return 8 * (self.num_vertices + 1) + self.num_edges * self.edge_bytes

    def share_of(self, ownership: Ownership) -> float:
        """The share of the vertices that the rank with the most owns."""
        largest = max(stop - first for first, stop in map(ownership.range_of, range(ownership.num_ranks)))
        return largest / max(1, self.num_vertices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows and edges of a rank are.

    ``row_bytes``: the size of a stored row of every vertex type; one without types. ``hit_rate``: the share of their
    bytes that are in the rank's cache; the others are in host memory, or on disk if ``disk`` is given.
    ``disk_hit_rate``: the share that are in any cache. ``near_graph``: edges are in the memory of the rank's device.
    ``host_samples``: the host samples for a device, in ``sampling_threads`` threads. ``prefetch``: steps made ahead.
    ``device_bytes``: of the cache and of edges, in the memory of a device; ``cache_bytes``: of a cache on the host.
    """

    row_bytes: tuple[float, ...]
    disk: DiskReads | None = None
    hit_rate: float = 0.0
    disk_hit_rate: float = 0.0
    near_graph: bool = False
    host_samples: bool = False
    prefetch: int = 0
    sampling_threads: int = 1
    device_bytes: float = 0.0
    cache_bytes: int = 0


def place_rank(
    rows: "StoredRows",
    spec: StrategySpec,
    ownership: Ownership,
    size: GraphSize,
    hardware: Hardware,
    loading: Loading,
    disk: DiskReads | None,
) -> Placement:
    """Place the rows and edges of the largest rank. A cache holds the hottest of the rows that a rank reads."""
    ranges = [(0, size.num_vertices)]
    if spec.reads_own_rows:
        ranges = [ownership.range_of(rank) for rank in range(ownership.num_ranks)]
    host_bytes = loading.cache_bytes
    if hardware.cores is not None:
        hit_rate = rows.hit_rate(ranges, host_bytes) if host_bytes else 0.0
        return Placement(
            rows.row_bytes,
            disk=disk,
            hit_rate=hit_rate,
            disk_hit_rate=hit_rate,
            prefetch=loading.prefetch or 0,
            cache_bytes=host_bytes,
        )
    edges_share = 1.0 if spec.needs_whole_graph else size.share_of(ownership)
    edge_bytes = edges_share * size.graph_bytes if loading.samples_on_device else 0.0
    cache_bytes = loading.device_cache_bytes
    if cache_bytes is None:
        free_bytes = max(0.0, hardware.memory_bytes - _RESERVED_BYTES - edge_bytes)
        rows_share = size.share_of(ownership) if spec.reads_own_rows else 1.0
        cache_bytes = int(min(free_bytes, rows_share * size.feature_bytes)) if rows.can_be_cached else 0
    prefetch = loading.prefetch
    if prefetch is None:
        prefetch = 0 if loading.samples_on_device else _DEFAULT_PREFETCH
    return Placement(
        rows.row_bytes,
        disk=disk,
        hit_rate=rows.hit_rate(ranges, cache_bytes) if cache_bytes else 0.0,
        disk_hit_rate=rows.hit_rate(ranges, cache_bytes + host_bytes) if cache_bytes + host_bytes else 0.0,
        near_graph=loading.samples_on_device,
        host_samples=not loading.samples_on_device,
        prefetch=prefetch,
        sampling_threads=loading.sampling_threads,
        device_bytes=cache_bytes + edge_bytes,
        cache_bytes=host_bytes,
    )


def rows_by_type(types: GraphTypes, features: Sequence[str]) -> dict[str, list[str]]:
    """The features of every vertex type; their names begin with it."""
    return {name: [found for found in features if found.startswith(f"{name}/")] for name in types.vertex_types}


class StoredRows:
    """The stored features of every vertex type, or of all vertices without types."""

    def __init__(self, store: Store, features: Sequence[str]) -> None:
        self._store = store
        self._features = features
        types = store.types
        self._of_types: dict[str, list[str]] | None = None
        if types is None:
            self.row_bytes: tuple[int, ...] = (stored_row_bytes(store, features),)
            self.num_bytes = store.num_vertices * self.row_bytes[0]
            return
        by_type = rows_by_type(types, features)
        self.row_bytes = tuple(stored_row_bytes(store, names) for names in by_type.values())
        self.num_bytes = sum(types.count(name) * size for name, size in zip(by_type, self.row_bytes, strict=True))
        self._of_types = {name: names for name, names in by_type.items() if names}

    @property
    def featured(self) -> list[str] | None:
        """The vertex types with features; None without types."""
        return None if self._of_types is None else list(self._of_types)

    @property
    def can_be_cached(self) -> bool:
        """Whether a device caches rows by itself: the store has their hotness, and the graph has no types."""
        return self._of_types is None and "hotness" in self._store.names

    def read_in_place(self, hardware: Hardware, loading: Loading) -> bool:
        """Whether ranks of one host read the rows of all of them in place, as the loader decides it."""
        is_plain = self._of_types is None and len(self._features) == 1
        is_mapped = not (loading.on_disk or loading.cache_bytes or loading.copies)
        return is_plain and is_mapped and hardware.cores is not None

    def hit_rate(self, ranges: Sequence[tuple[int, int]], cache_bytes: int) -> float:
        """The share of the bytes that ranks read, each of a range of vertices, that are in their caches."""
        hits = 0.0
        total = 0.0
        for first, stop in ranges:
            for hotness, order, size in self._cached(first, stop, cache_bytes):
                reads = float(hotness.sum()) * size
                hits += reads * expected_hit_rate(hotness, order)
                total += reads
        return hits / total if total else 0.0

    def _cached(self, first: int, stop: int, cache_bytes: int) -> Iterator[tuple[Array, HotOrder, int]]:
        """Hotness, order and size of the rows of every type with features."""
        store = self._store
        if self._of_types is None:
            order = cached_order(store, first, stop, self._features, cache_bytes)
            yield hotness_of(store, first, stop), order, self.row_bytes[0]
            return
        for name, order in typed_orders(store, first, stop, self._of_types, cache_bytes).items():
            hotness = np.concatenate([np.empty(0, np.int64), *typed_hotness(store, first, stop, name)])
            yield hotness, order, stored_row_bytes(store, self._of_types[name])
