"""Sums of rows over the edges of every row of a CSR matrix on a device; ``kernels.sums`` has the definition.

One program, of one warp, handles one row and some columns: nothing is shared between warps, so there are no barriers,
and no atomics. Rows of 16 bits are added in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.triton.launch import launch, num_blocks

__all__ = ["sum_kernel", "sum_rows", "sum_tile"]


@triton.jit
def sum_kernel(
    offsets, rows, weights, x, width, out, WEIGHTED: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr
):
    """``out[i]``: the sum of ``weights[e] * x[rows[e]]`` over the edges of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, stop = tl.load(offsets + row), tl.load(offsets + row + 1)
    number = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        source = tl.load(rows + edge, mask=inside, other=0)
        wanted = inside[:, None] & (column < width)[None, :]
        value = tl.load(x + source[:, None] * width + column[None, :], mask=wanted, other=0).to(number)
        if WEIGHTED:
            value *= tl.load(weights + edge, mask=inside, other=0).to(number)[:, None]
        total += tl.sum(value, axis=0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def sum_tile(width: int) -> dict[str, int]:
    """EDGES and COLUMNS of a tile: up to 256 columns, and as many edges as make 512 numbers, at most 16."""
    columns = min(256, 1 << max(0, width - 1).bit_length())
    return {"EDGES": min(16, 512 // columns), "COLUMNS": columns}


def sum_rows(offsets: Tensor, rows: Tensor, weights: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of every row, [offsets.numel() - 1, C], as ``dtype``; ``weights``: one number per edge, None for 1."""
    x = x.detach().contiguous()
    out = x.new_empty(offsets.numel() - 1, x.size(1), dtype=dtype)
    tile = sum_tile(x.size(1))
    launch(
        sum_kernel,
        (out.size(0), num_blocks(x.size(1), tile["COLUMNS"])),
        (offsets, rows, x if weights is None else weights.contiguous(), x, x.size(1), out),
        {"WEIGHTED": weights is not None, **tile, "num_warps": 1},
        (out,),
    )
    return out
