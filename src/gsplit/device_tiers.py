"""A rank's input rows for a device: which it holds itself, and how it gets the others."""

import logging
import mmap
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from gsplit.devices import register_memory
from gsplit.feature_tiers import cached_order
from gsplit.features.budget import parse_bytes
from gsplit.features.device import DeviceRows, RegisteredRows, StagedRows
from gsplit.features.hot_order import HotOrder, clip_parts
from gsplit.features.protocol import HostSource
from gsplit.kernels.dispatch import kernel_for
from gsplit.local_graph import LocalGraph

__all__ = ["open_device_rows"]

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20


def open_device_rows(
    local: LocalGraph, names: Sequence[str], source: HostSource, device: torch.device, *, cache: int | str, held: bool
) -> DeviceRows:
    """The rows of ``source`` for a device that keeps the hottest ones, in ``cache`` bytes of its memory.

    ``held``: all rows may be copied into host memory once, where the device reads them by itself; without, and where
    it cannot, the host reads those that the device lacks.
    """
    num_bytes, store = parse_bytes(cache, "device_cache"), local.store
    order = HotOrder(clip_parts(store.part_boundaries, local.first, local.stop), (0,) * _num_parts(local))
    if num_bytes:
        order = cached_order(store, local.first, local.stop, names, num_bytes)
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


def _num_parts(local: LocalGraph) -> int:
    return len(clip_parts(local.store.part_boundaries, local.first, local.stop)) - 1


def _read(source: HostSource, order: HotOrder, num_rows: int) -> Tensor:
    """The first rows in the order, in pages of their own, as registering wants them; read piece by piece."""
    shape = (num_rows, *source.row_shape)
    num_bytes, flags = max(1, prod(shape) * source.dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_bytes, flags)
    rows = torch.frombuffer(pages, dtype=source.dtype, count=prod(shape)).view(shape) if prod(shape) else _none(source)
    step = max(1, _CHUNK_BYTES // max(1, rows[:1].nbytes))
    for start in range(0, num_rows, step):
        ids = order.ids(start, min(start + step, num_rows))
        source.place(np.ascontiguousarray(ids), None, rows[start : start + ids.size])
    return rows


def _none(source: HostSource) -> Tensor:
    return torch.empty(0, *source.row_shape, dtype=source.dtype, device="cpu")
