"""The input rows of a rank: which source each feature array has, with a cache above it, on the host or for a device.

A tier never changes a row, so it never changes a result. The order is

    rows side by side <- int8 to float32 <- cache <- memory map, or file, or a source of the program's own

so that a cache holds rows as they are stored, the most for its bytes. A device keeps its hottest rows; the others it
reads from registered host memory, or the host reads them for it.
"""

import logging
import mmap
import weakref
from collections.abc import Sequence
from contextlib import closing
from math import prod

import torch
from torch import Tensor

from gsplit.device.devices import register_memory
from gsplit.errors import InputError, explain
from gsplit.features.cache import (
    CachedRows,
    HotOrder,
    cached_order,
    clip_parts,
    fill_in_order,
    hotness_of,
    hottest_prefixes,
    parse_bytes,
)
from gsplit.features.device import DeviceRows, RegisteredRows, StagedRows
from gsplit.features.disk import DiskRows
from gsplit.features.protocol import HostSource, RowSource
from gsplit.features.sources import ConcatRows, MappedRows, ScaledRows, UserRows, torch_dtype
from gsplit.kernels.dispatch import kernel_for
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

__all__ = ["open_device_rows", "open_features"]


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


_LOG = logging.getLogger(__name__)


def open_device_rows(
    local: LocalGraph, source: HostSource, device: torch.device, *, cache: int | str, held: bool
) -> DeviceRows:
    """The rows of ``source`` for a device that keeps the hottest ones, in ``cache`` bytes of its memory.

    ``held``: all rows may be copied into host memory once, where the device reads them by itself; without, and where
    it cannot, the host reads those that the device lacks.
    """
    store, boundaries = local.store, clip_parts(local.store.part_boundaries, local.first, local.stop)
    lengths: tuple[int, ...] = (0,) * (len(boundaries) - 1)
    if num_bytes := parse_bytes(cache, "device_cache"):
        row_bytes = prod(source.row_shape) * source.dtype.itemsize  # as the device holds them, not as they are stored
        lengths = hottest_prefixes(
            hotness_of(store, local.first, local.stop), boundaries, num_bytes // max(1, row_bytes)
        )
    order = HotOrder(boundaries, lengths)
    if held and kernel_for("gather", device) == "triton":
        rows = _read(source, order, order.num_vertices)
        release = register_memory(rows, device)
        if release is not None:
            found = RegisteredRows(rows, rows[: order.num_cached].to(device), order)
            weakref.finalize(found, release).atexit = False  # before its memory goes; a process that ends need not
            return found
        _LOG.warning("the driver does not let %s read host memory in place: the host reads rows for it", device)
    cached = (_read(source, order, order.num_cached).to(device), order) if order.num_cached else None
    return StagedRows(source, cached)


def _read(source: HostSource, order: HotOrder, num_rows: int) -> Tensor:
    """The first rows in the order, in pages of their own, as registering wants them."""
    shape = (num_rows, *source.row_shape)
    num_bytes, flags = max(1, prod(shape) * source.dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_bytes, flags)
    rows = (
        torch.frombuffer(pages, dtype=torch.uint8)[: prod(shape) * source.dtype.itemsize].view(source.dtype).view(shape)
    )
    fill_in_order(source, order, rows)
    return rows
