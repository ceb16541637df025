"""Gathering rows from a cache on the device and, where they are not in it, from host memory: one pass, no map.

The store is sorted hottest first, so a cache holds the first rows: those at ``position < num_cached``. Cold rows are
read by the same kernel through the address that host memory has on the device, if it was registered with the driver.
Rows are moved as bits, so any element type will do. Rows of int8 with scales are multiplied on the way and become
float32. Twin: ``kernels.rows.copy_rows``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.triton.launch import launch, num_blocks, tile_of

__all__ = ["as_bits", "gather_kernel", "gather_rows"]

_MOST_PROGRAMS = 80
"""Of 4 warps: enough to fill the bus, and few enough that the step which trains meanwhile gets most of the GPU."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the element's size."""
    return tensor.detach().view(_BITS[tensor.element_size()])


@triton.jit(do_not_specialize=("num_cached", "num_rows", "num_tiles"))
def gather_kernel(
    cached,
    stored,
    num_cached,
    positions,
    num_rows,
    num_tiles,
    width,
    out,
    out_stride,
    scales,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[i] = (cached if positions[i] < num_cached else stored)[positions[i]]``; a program takes several tiles.

    With ``SCALED``, float32 of it times ``scales[positions[i]]``.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        wanted = (row < num_rows)[:, None] & (column < width)[None, :]
        position = tl.load(positions + row, mask=row < num_rows, other=0)
        hot = (position < num_cached)[:, None] & wanted
        place = position[:, None] * width + column[None, :]
        value = tl.load(cached + place, mask=hot, other=0)
        cold = tl.load(stored + place, mask=wanted & ~hot, other=0)
        target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        value = tl.where(hot, value, cold)
        if SCALED:
            scale = tl.load(scales + position, mask=row < num_rows, other=0)
            value = value.to(tl.float32) * scale[:, None]
        tl.store(target, value, mask=wanted)


def gather_rows(cached: Tensor, stored: Tensor, positions: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
    """``out[i] = stored[positions[i]]``, from ``cached``, the first rows of ``stored``, where it has them.

    ``cached`` [num_cached, width] is on the device, ``stored`` [num_stored, width] in registered host memory; both are
    contiguous. ``out`` [num_rows, width] may have longer rows behind it. Positions, int64, have been checked.
    ``scales`` [num_stored], float32 on the device: rows of int8 become ``float32(row) * scale``.
    """
    assert cached.is_contiguous() and stored.is_contiguous() and out.stride(-1) == 1
    num_rows, width = out.shape
    rows, columns = tile_of(width)
    target = as_bits(out) if scales is None else out
    num_tiles = num_blocks(num_rows, rows)
    launch(
        gather_kernel,
        (min(num_tiles, _MOST_PROGRAMS), num_blocks(width, columns)),
        (
            as_bits(cached),
            as_bits(stored),
            cached.size(0),
            positions,
            num_rows,
            num_tiles,
            width,
            target,
            out.stride(0),
            positions if scales is None else scales,
        ),
        {"SCALED": scales is not None, "ROWS": rows, "COLUMNS": columns},
        (target,),
    )
