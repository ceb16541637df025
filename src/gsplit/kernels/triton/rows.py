"""The row moves of a shuffle on a device: copy and gather in one launch, merge a gradient in one.

Twins of ``kernels.rows``. The merge adds what peers returned in the order of the send buffer, as the host does: which
of its places return to a row is found by a stable sort, so that no sum depends on the order of threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.csr import group_rows
from gsplit.kernels.triton.gather import as_bits
from gsplit.kernels.triton.launch import launch, num_blocks, tile_of

__all__ = ["copy_and_gather", "merge_gradient", "merge_kernel", "spread_kernel"]


@triton.jit(do_not_specialize=("num_own", "num_out"))
def spread_kernel(h, rows, num_own, num_out, width, own, sent, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``own = h`` and ``sent[k] = h[rows[k]]``: rows of both outputs are numbered one after the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_out)[:, None] & (column < width)[None, :]
    is_own = row < num_own
    place = tl.where(is_own, 0, row - num_own)
    source = tl.load(rows + place, mask=~is_own & (row < num_out), other=0)
    source = tl.where(is_own, row.to(tl.int64), source)
    value = tl.load(h + source[:, None] * width + column[None, :], mask=inside, other=0)
    tl.store(own + row.to(tl.int64)[:, None] * width + column[None, :], value, mask=inside & is_own[:, None])
    tl.store(sent + place.to(tl.int64)[:, None] * width + column[None, :], value, mask=inside & ~is_own[:, None])


@triton.jit(do_not_specialize=("num_rows", "num_dst"))
def merge_kernel(
    g_mixed,
    g_dst,
    offsets,
    places,
    returned,
    num_rows,
    num_dst,
    width,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[i] = g_mixed[i] + returned[k] for k in places[offsets[i] : offsets[i + 1]] + g_dst[i]``, in this order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    here = row.to(tl.int64)[:, None] * width + column[None, :]
    start = tl.load(offsets + row, mask=row < num_rows, other=0)
    count = tl.load(offsets + row + 1, mask=row < num_rows, other=0) - start
    total = tl.load(g_mixed + here, mask=inside, other=0)
    for step in range(tl.max(count, axis=0)):
        more = step < count
        place = tl.load(places + start + step, mask=more, other=0)
        part = tl.load(returned + place[:, None] * width + column[None, :], mask=inside & more[:, None], other=0)
        total = tl.where(more[:, None], total + part, total)  # adding 0 would turn -0 into 0
    has_dst = (row < num_dst)[:, None]
    part = tl.load(g_dst + here, mask=inside & has_dst, other=0)
    tl.store(out + here, tl.where(has_dst, total + part, total), mask=inside)


def _matrix(tensor: Tensor, width: int) -> Tensor:
    return tensor.detach().reshape(tensor.size(0), width).contiguous()


def copy_and_gather(h: Tensor, rows: Tensor, own: Tensor, sent: Tensor) -> None:
    """``own = h`` and ``sent[k] = h[rows[k]]``; outputs are contiguous, trailing dimensions are those of ``h``."""
    assert own.is_contiguous() and sent.is_contiguous()
    if not h.numel():
        return
    width, num_out = h[0].numel(), h.size(0) + rows.numel()
    tile_rows, columns = tile_of(width)
    targets = (as_bits(own), as_bits(sent))
    launch(
        spread_kernel,
        (num_blocks(num_out, tile_rows), num_blocks(width, columns)),
        (as_bits(_matrix(h, width)), rows, h.size(0), num_out, width, *targets),
        {"ROWS": tile_rows, "COLUMNS": columns},
        targets,
    )


def merge_gradient(g_mixed: Tensor, g_dst: Tensor, rows: Tensor, returned: Tensor, out: Tensor) -> None:
    """``out = g_mixed[:len(out)]``, with ``returned[k]`` added to row ``rows[k]`` and ``g_dst`` to the first rows."""
    assert out.is_contiguous()
    if not out.numel():
        return
    width = out[0].numel()
    tile_rows, columns = tile_of(width)
    offsets, places = group_rows(rows, out.size(0))
    launch(
        merge_kernel,
        (num_blocks(out.size(0), tile_rows), num_blocks(width, columns)),
        (
            _matrix(g_mixed, width),
            _matrix(g_dst, width),
            offsets,
            places,
            _matrix(returned, width),
            out.size(0),
            g_dst.size(0),
            width,
            out,
        ),
        {"ROWS": tile_rows, "COLUMNS": columns},
        (out,),
    )
