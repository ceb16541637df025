"""A rank's input rows for a device: which it holds itself, and how it gets the others.

Stands beside ``feature_tiers``, in the loader's second stage. Refuses a cache for a store that does not know its
hottest rows.
"""

import logging
import mmap
import weakref
from math import prod

import torch
from torch import Tensor

from gsplit.devices import register_memory
from gsplit.feature_tiers import hotness_of
from gsplit.features.cache import HotOrder, clip_parts, fill_in_order, hottest_prefixes, parse_bytes
from gsplit.features.device import DeviceRows, RegisteredRows, StagedRows
from gsplit.features.protocol import HostSource
from gsplit.kernels.dispatch import kernel_for
from gsplit.local_graph import LocalGraph

__all__ = ["open_device_rows"]

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
