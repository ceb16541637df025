"""Where a rank's input rows lie: in a memory map, a file or elsewhere, with a hot cache above, in one array or several.

A tier never changes a row, so it never changes a result. The order is

    rows side by side <- int8 to float32 <- cache <- memory map, or file, or a source of the program's own

so that a cache holds rows as they are stored, the most for its bytes.
"""

from collections.abc import Sequence
from contextlib import closing
from math import prod

from gsplit.errors import InputError, explain
from gsplit.features.cache import CachedRows, HotOrder, clip_parts, hottest_prefixes, parse_bytes
from gsplit.features.disk import DiskRows
from gsplit.features.protocol import HostSource, RowSource
from gsplit.features.sources import ConcatRows, MappedRows, ScaledRows, UserRows, torch_dtype
from gsplit.local_graph import LocalGraph
from gsplit.store.files import Array
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

__all__ = ["cached_order", "hotness_of", "open_features", "stored_row_bytes"]


def open_features(
    local: LocalGraph, features: Sequence[str | RowSource], *, cache: int | str = 0, on_disk: bool = False
) -> HostSource:
    """The input rows of a rank's vertices: stored features by name, and sources of the program's own, side by side.

    ``cache``: bytes of memory for the rank's hottest rows, such as "2GB", which needs a partitioned store. ``on_disk``:
    read files instead of mapping them, for stored features that do not fit into memory.
    """
    store, num_bytes = local.store, parse_bytes(cache)
    names = [name for name in features if isinstance(name, str)]
    for name in names:
        store.stored_array(f"features/{name}")
    if on_disk and not names:
        got, fix = "sources of the program's own", "leave features_on_disk out"
        raise InputError(explain("features_on_disk", "stored features", got, fix))
    order = cached_order(store, local.first, local.stop, features, num_bytes) if num_bytes else None
    sources = [_open(local, found, order, on_disk=on_disk) for found in features]
    return sources[0] if len(sources) == 1 else ConcatRows(sources)


def cached_order(
    store: GraphStore, first: int, stop: int, features: Sequence[str | RowSource], cache_bytes: int
) -> HotOrder:
    """Which rows of the vertices ``first .. stop - 1`` a cache of this size holds; reads a few numbers only."""
    boundaries = clip_parts(store.part_boundaries, first, stop)
    num_rows = cache_bytes // max(1, stored_row_bytes(store, features))
    return HotOrder(boundaries, hottest_prefixes(hotness_of(store, first, stop), boundaries, num_rows))


def hotness_of(store: GraphStore, first: int, stop: int) -> Array:
    """How often presampling loaded the vertices ``first .. stop - 1``."""
    if "hotness" not in store.names:
        fix = "run gsplit partition, or leave the cache out"
        raise InputError(explain("cache", "a partitioned store, which knows its hottest rows", "another", fix))
    low = store.vertex_range[0]
    return store.stored_array("hotness")[first - low : stop - low]


def stored_row_bytes(store: GraphStore, features: Sequence[str | RowSource]) -> int:
    """Bytes of one vertex's rows as they are stored, or as a source of the program's own gives them."""
    own = [found for found in features if not isinstance(found, str)]
    arrays = [store.stored_array(f"features/{name}") for name in features if isinstance(name, str)]
    stored = sum(prod(array.shape[1:]) * array.itemsize for array in arrays)
    return stored + sum(prod(source.row_shape) * source.dtype.itemsize for source in own)


def _open(local: LocalGraph, found: str | RowSource, order: HotOrder | None, *, on_disk: bool) -> HostSource:
    if isinstance(found, str):
        return _open_array(local, found, order, on_disk=on_disk)
    given = UserRows(found, local.to_original_ids)
    return given if order is None else CachedRows(given, order)


def _open_array(local: LocalGraph, name: str, order: HotOrder | None, *, on_disk: bool) -> HostSource:
    store, full = local.store, f"features/{name}"
    low, array, dtype = store.vertex_range[0], store.stored_array(full), torch_dtype(store.dtype(full))
    source: HostSource = _open_file(store, full) if on_disk else MappedRows(full, array, dtype, low)
    if order is not None:
        source = CachedRows(source, order)
    if store.dtype(full) != "int8":
        return source
    scales, first = store.stored_array(f"scales/{name}"), low
    if on_disk and isinstance(store, Store):  # a map would end the process where a file is cut off
        with closing(store.open_file(f"scales/{name}")) as file:
            scales, first = file.read(local.first - low, local.stop - low), local.first
    return ScaledRows(full, source, scales, first)


def _open_file(store: GraphStore, name: str) -> DiskRows:
    if not isinstance(store, Store):
        fix = "write it with gsplit.from_pyg(data, path), or leave features_on_disk out"
        raise InputError(explain("features_on_disk", "a store on disk", "a graph in memory", fix))
    shape, dtype = store.stored_array(name).shape, torch_dtype(store.dtype(name))
    descriptor, offset = store.open_file(name).detach()
    return DiskRows(
        str(store.path / f"{name}.npy"),
        descriptor,
        offset=offset,
        num_rows=shape[0],
        row_shape=shape[1:],
        dtype=dtype,
        first_id=store.vertex_range[0],
    )
