"""Opens the input rows of a rank: the source of each feature array, with a cache above it, on the host or for a device.

The tiers are

    concatenation <- int8 to float32 <- cache <- memory map, file, object storage or user-defined source

Of a store on object storage whose features are not fetched, the hottest rows are in a second cache, on disk.
A cache holds rows in their stored type, so that it holds as many as possible. A device keeps its hottest rows. It reads
the others from registered host memory, or the host reads them for it; rows of one int8 array are int8 there too, and
the device keeps the scales of all of them, 4 bytes per row. Tiers do not change the values of rows.
"""

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from math import prod

import torch
from torch import Tensor

from gsplit.device.devices import DEVICE_MARGIN, free_memory, new_pages, register_memory
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.cache import (
    CachedRows,
    HotOrder,
    cached_order,
    clip_parts,
    fill_in_order,
    hotness_of,
    hottest_prefixes,
    typed_orders,
)
from gsplit.features.device import DeviceRows, RegisteredRows, StagedRows
from gsplit.features.disk import DiskRows
from gsplit.features.protocol import HostSource, RowSource
from gsplit.features.remote import RemoteRows, cache_on_disk
from gsplit.features.sources import ConcatRows, MappedRows, ScaledRows, UserRows, stored_form, torch_dtype
from gsplit.files.byte_sizes import parse_bytes
from gsplit.kernels.dispatch import kernel_for
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store
from gsplit.store.remote import RowBlocks

__all__ = ["can_read_foreign_rows", "open_device_rows", "open_features", "open_typed_features", "stays_remote"]

_LOG = logging.getLogger(__name__)
_REGISTERED: "weakref.WeakValueDictionary[tuple[object, ...], RegisteredRows]" = weakref.WeakValueDictionary()
"""Rows that loaders of this process use, so that loaders of the same rows share them."""
_OPENING = threading.Lock()


def open_features(
    local: LocalGraph,
    features: Sequence[str | RowSource],
    *,
    cache: int | str = 0,
    on_disk: bool = False,
    vertex_type: str | None = None,
) -> HostSource:
    """Open the input rows of a rank's vertices: stored features by name and user-defined sources, concatenated.

    ``cache``: memory for the rank's hottest rows, such as "2GB"; needs a partitioned store. ``on_disk``: read files
    instead of mapping them, for stored features that do not fit into memory. ``vertex_type``: the type of a
    heterogeneous graph whose features they are; rows are then numbered by ``GraphTypes.rows``.
    """
    store = local.store
    num_bytes = parse_bytes(cache)
    names = [name for name in features if isinstance(name, str)]
    for name in names:
        store.shape(f"features/{name}")  # refuses names that are not stored
    if on_disk and not names:
        got = "only user-defined sources" if features else "features=None"
        raise InputError(explain("features_on_disk", "stored features", got, "leave features_on_disk out"))
    order = cached_order(store, local.first, local.stop, features, num_bytes) if num_bytes else None
    sources = [_open(local, found, order, on_disk=on_disk, vertex_type=vertex_type) for found in features]
    return _concat(sources)


def can_read_foreign_rows(rows: RowSource, store: GraphStore, mesh: Mesh, *, wanted: bool) -> bool:
    """Whether every rank of the replica reads the input rows of all of them, from one array of a whole store.

    ``wanted``: whether this rank would. Ranks of several hosts exchange rows instead, so that a host reads only the
    rows that its ranks own. A collective: ranks may have different caches and stores.
    """
    stored, _ = stored_form(rows)
    is_whole = isinstance(stored, MappedRows) and store.vertex_range == (0, store.num_vertices)
    found = wanted and is_whole and mesh.device.type == "cpu"
    # all ranks: once per loader; opening rows may be slow
    answers = mesh.control.gather_text(Call("open rows", long_wait=True), str(found))
    first = mesh.replica * mesh.num_splits
    return set(answers[first : first + mesh.num_splits]) == {str(True)}


def open_typed_features(
    local: LocalGraph, features: Mapping[str, Sequence[str]], *, cache: int = 0, on_disk: bool = False
) -> dict[str, HostSource]:
    """Open the input rows of every vertex type with features. ``cache``: bytes for the hottest rows of all types."""
    orders = typed_orders(local.store, local.first, local.stop, features, cache) if cache else {}
    return {
        name: _concat(
            [_open_array(local, found, orders.get(name), on_disk=on_disk, vertex_type=name) for found in names]
        )
        for name, names in features.items()
    }


def _concat(sources: list[HostSource]) -> HostSource:
    return sources[0] if len(sources) == 1 else ConcatRows(sources)


def _open(
    local: LocalGraph, found: str | RowSource, order: HotOrder | None, *, on_disk: bool, vertex_type: str | None
) -> HostSource:
    if isinstance(found, str):
        return _open_array(local, found, order, on_disk=on_disk, vertex_type=vertex_type)
    rows = UserRows(found, local.to_original_ids)
    return rows if order is None else CachedRows(rows, order)


def _open_array(
    local: LocalGraph, name: str, order: HotOrder | None, *, on_disk: bool, vertex_type: str | None
) -> HostSource:
    store = local.store
    full = f"features/{name}"
    first = local.first_row(vertex_type)
    source: HostSource
    blocks = store.open_blocks(full) if isinstance(store, Store) else None
    if blocks is not None:
        source = _open_remote(local, name, blocks, vertex_type)
    elif on_disk:
        source = _open_file(store, full, first)
    else:
        source = MappedRows(full, store.stored_array(full), torch_dtype(store.dtype(full)), first)
    if order is not None:
        source = CachedRows(source, order)
    if store.dtype(full) != "int8":
        return source
    if not on_disk or blocks is not None:
        return ScaledRows(full, source, store.stored_array(f"scales/{name}"), first)
    assert isinstance(store, Store)
    low, high = local.first, local.stop
    if vertex_type is not None:
        assert store.types is not None
        low, high = store.types.row_range(vertex_type, local.first, local.stop)
    with closing(store.open_file(f"scales/{name}")) as file:  # not mapped: a truncated map would end the process
        scales = file.read(low - first, high - first)
    return ScaledRows(full, source, scales, low)


def stays_remote(store: GraphStore) -> bool:
    """Whether the features of a store stay on object storage, and only the hottest are copied."""
    return isinstance(store, Store) and store.mirror is not None and store.mirror.cache_bytes is not None


def _open_remote(local: LocalGraph, name: str, blocks: RowBlocks, vertex_type: str | None) -> HostSource:
    """The rows of an array on object storage, with the rank's hottest ones on disk."""
    store = local.store
    assert isinstance(store, Store) and store.mirror is not None and store.mirror.cache_bytes is not None
    full = f"features/{name}"
    rows = RemoteRows(blocks, store.shape(full)[1:], torch_dtype(store.dtype(full)), local.first_row(vertex_type))
    if not store.mirror.cache_bytes:
        return rows
    if vertex_type is None:
        order = cached_order(store, local.first, local.stop, [name], store.mirror.cache_bytes)
    else:
        order = typed_orders(store, local.first, local.stop, {vertex_type: [name]}, store.mirror.cache_bytes)[
            vertex_type
        ]
    return cache_on_disk(rows, order, store.mirror.folder / "hot", full)


def _open_file(store: GraphStore, name: str, first_id: int) -> DiskRows:
    if not isinstance(store, Store):
        fix = "write it with gsplit.from_pyg(data, path), or leave features_on_disk out"
        raise InputError(explain("features_on_disk", "a store on disk", "a graph in memory", fix))
    shape = store.shape(name)
    descriptor, offset = store.open_file(name).detach()
    return DiskRows(
        f"{store.where}/{name}.npy",
        descriptor,
        offset=offset,
        num_rows=shape[0],
        row_shape=shape[1:],
        dtype=torch_dtype(store.dtype(name)),
        first_id=first_id,
    )


def open_device_rows(
    local: LocalGraph, source: HostSource, device: torch.device, names: Sequence[str], *, cache: int | None, held: bool
) -> DeviceRows:
    """Open the rows of ``source`` for a device that keeps the hottest ones, in ``cache`` bytes of its memory.

    ``names``: the stored features of the source. ``cache``: None for as many rows as fit beside ``DEVICE_MARGIN``.
    ``held``: all rows may be copied once to host memory that the device reads directly, unless its own memory holds all
    of them. Otherwise, or if the device cannot read host memory, the host reads the rows that are not on the device.
    """
    key = (*_identify(local.store, names), local.first, local.stop, device, cache, held)
    with _OPENING:
        return _REGISTERED.get(key) or _open_device_rows(local, source, device, key, cache=cache, held=held)


def _identify(store: GraphStore, names: Sequence[str]) -> tuple[object, ...]:
    """What rows of a store are known by: path, parts and checksums. Those of a graph in memory are not shared."""
    if not isinstance(store, Store):
        return (object(),)
    wanted = {"hotness", *(f"{kind}/{name}" for kind in ("features", "scales") for name in names)}
    sums = tuple((name, entry.sha256) for name, entry in sorted(store.manifest.arrays.items()) if name in wanted)
    return (store.path, tuple(store.part_boundaries), *names, *sums)


def _open_device_rows(
    local: LocalGraph,
    source: HostSource,
    device: torch.device,
    key: tuple[object, ...],
    *,
    cache: int | None,
    held: bool,
) -> DeviceRows:
    boundaries = clip_parts(local.store.part_boundaries, local.first, local.stop)
    lengths: tuple[int, ...] = (0,) * (len(boundaries) - 1)
    stored, scales = stored_form(source)
    if num_bytes := max(0, free_memory(device) - DEVICE_MARGIN) if cache is None else cache:
        row_bytes = prod(stored.row_shape) * stored.dtype.itemsize
        hotness = hotness_of(local.store, local.first, local.stop)
        lengths = hottest_prefixes(hotness, boundaries, num_bytes // max(1, row_bytes))
    order = HotOrder(boundaries, lengths)
    if held and kernel_for("gather", device) == "triton":
        num_rows = order.num_vertices
        factors = None if scales is None else _copy_hottest(_read(scales, order, num_rows), device)
        rows = _read(stored, order, num_rows)
        if order.num_cached == num_rows:
            on_device = _copy_hottest(rows, device)
            _REGISTERED[key] = found = RegisteredRows(on_device, on_device, order, factors)
            return found
        release = register_memory(rows, device)
        if release is not None:
            try:
                found = RegisteredRows(rows, _copy_hottest(rows[: order.num_cached], device), order, factors)
            except InputError:
                release()
                raise
            _REGISTERED[key] = found
            weakref.finalize(found, release).atexit = False  # before the memory is freed; not needed at exit
            return found
        del rows
        _LOG.warning("the driver does not let %s read host memory in place: the host reads rows for it", device)
    cached = (_copy_hottest(_read(stored, order, order.num_cached), device), order) if order.num_cached else None
    return StagedRows(source, cached)


def _copy_hottest(rows: Tensor, device: torch.device) -> Tensor:
    try:
        return rows.to(device)
    except torch.OutOfMemoryError as error:
        fix = "choose a smaller device_cache; hidden features and gradients need memory of the device too"
        expected = f"{rows.nbytes} bytes of free memory of {device}"
        raise InputError(explain("device_cache", expected, error, fix)) from None


def _read(source: HostSource, order: HotOrder, num_rows: int) -> Tensor:
    """The first rows of an order, in whole memory pages, which registering requires."""
    rows = new_pages((num_rows, *source.row_shape), source.dtype)
    fill_in_order(source, order, rows)
    return rows
