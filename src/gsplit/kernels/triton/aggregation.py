"""Sum or mean of in-neighbours over a block in compressed sparse row form, forward and backward, without atomics.

For rows ``x`` [num_src, D] and a block whose destination i has the edges e in ``indptr[i] .. indptr[i + 1] - 1``:

    forward:  out[i] = sum over e of x[src_rows[e]]           divided by the number of edges for a mean; 0 without edges
    backward: g_x[j] = sum over e with src_rows[e] = j of g_out[dst(e)]         each divided likewise for a mean

Backward is the same sum over the transposed block, which a stable sort makes. Every sum is made by one program in an
order that depends on the block alone, EDGES at a time. Only the block is saved.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.kernels.csr import destination_rows
from gsplit.kernels.triton.launch import launch, num_blocks, tile_of
from gsplit.kernels.triton.rows import group_rows

__all__ = ["Transposed", "aggregate", "aggregate_kernel", "transpose"]


@dataclass(frozen=True, slots=True)
class Transposed:
    """The edges of a block by source: those of row j are ``edges[indptr[j] : indptr[j + 1]]``, ascending.

    ``dst_rows[k]`` is the destination of edge ``edges[k]``.
    """

    indptr: Tensor
    edges: Tensor
    dst_rows: Tensor


def transpose(indptr: Tensor, src_rows: Tensor, num_src: int) -> Transposed:
    """A block by source instead of by destination. Waits for no device."""
    dst_rows = destination_rows(indptr, src_rows.numel())
    offsets, edges = group_rows(src_rows, num_src)
    return Transposed(offsets, edges, dst_rows[edges])


@triton.jit
def aggregate_kernel(
    x,
    indptr,
    rows,
    counts_indptr,
    width,
    out,
    MEAN: tl.constexpr,
    BACKWARD: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[i]``: the sum of ``x[rows[k]]`` over row i's entries k; for a mean see the module."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    total = tl.zeros([COLUMNS], x.dtype.element_ty)
    for begin in range(start, stop, EDGES):
        entry = begin + tl.arange(0, EDGES)
        inside = entry < stop
        source = tl.load(rows + entry, mask=inside, other=0)
        wanted = inside[:, None] & (column < width)[None, :]
        value = tl.load(x + source[:, None] * width + column[None, :], mask=wanted, other=0)
        if MEAN and BACKWARD:
            end = tl.load(counts_indptr + source + 1, mask=inside, other=1)
            count = end - tl.load(counts_indptr + source, mask=inside, other=0)
            value = value / count.to(value.dtype)[:, None]
        total += tl.sum(value, axis=0)
    if MEAN and not BACKWARD:
        total = total / tl.maximum(stop - start, 1).to(total.dtype)
    tl.store(out + row.to(tl.int64) * width + column, total, mask=column < width)


def _sum_rows(x: Tensor, indptr: Tensor, rows: Tensor, counts_indptr: Tensor, *, mean: bool, backward: bool) -> Tensor:
    width = prod(x.shape[1:])
    flat = x.detach().reshape(x.size(0), width).contiguous()
    out = torch.empty(indptr.numel() - 1, width, dtype=x.dtype, device=x.device)
    edges, columns = tile_of(width)
    launch(
        aggregate_kernel,
        (out.size(0), num_blocks(width, columns)),
        (flat, indptr, rows, counts_indptr, width, out),
        {"MEAN": mean, "BACKWARD": backward, "EDGES": edges, "COLUMNS": columns},
        (out,),
    )
    return out.view(out.size(0), *x.shape[1:])


class _Aggregate(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indptr: Tensor, src_rows: Tensor, mean: bool) -> Tensor:
        ctx.block, ctx.mean, ctx.num_src = (indptr, src_rows), mean, x.size(0)
        return _sum_rows(x, indptr, src_rows, indptr, mean=mean, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        indptr, src_rows = ctx.block
        by_source = transpose(indptr, src_rows, ctx.num_src)
        g_x = _sum_rows(g, by_source.indptr, by_source.dst_rows, indptr, mean=ctx.mean, backward=True)
        return g_x, None, None, None


def aggregate(x: Tensor, indptr: Tensor, src_rows: Tensor, *, mean: bool) -> Tensor:
    """The sum or mean of each destination's sources; float32 or float64 [num_src, ...] -> [num_dst, ...].

    ``indptr``, ``src_rows``: int64, those of a ``Block``.
    """
    out: Tensor = _Aggregate.apply(x, indptr, src_rows, mean)  # type: ignore[no-untyped-call]
    return out
