"""Keyed dropout in one pass: the mask of ``nn.dropout``, made where it is used and never stored.

float32 and float64 are multiplied in their own type, as the host kernel does. bfloat16 goes through float32 and is
rounded to the nearest even by integer arithmetic: the same on every architecture, and some compilers have no such
instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.triton.launch import launch, num_blocks, tile_of
from gsplit.kernels.triton.words import float_halves, join, join_float, mix, word_halves

__all__ = ["dropout_kernel", "round_to_bfloat16", "scale_kept"]

_WORDS = ("threshold_high", "threshold_low", "scale_high", "scale_low")


@triton.jit
def round_to_bfloat16(value):
    """float32 to the bits of the nearest bfloat16, as int16; ties go to the even one, every NaN becomes 0x7FC0."""
    bits = value.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, nearest, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit(do_not_specialize=("num_rows", *_WORDS))
def dropout_kernel(
    x,
    row_keys,
    num_rows,
    num_columns,
    threshold_high,
    threshold_low,
    scale_high,
    scale_low,
    out,
    IS_BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out = x * scale`` where 32 bits of (row key, column) reach the threshold, else 0; two columns share a word."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    key = tl.load(row_keys + row, mask=row < num_rows, other=0).to(tl.uint64, bitcast=True)
    word = mix(key[:, None], (column // 2).to(tl.uint64)[None, :])
    half = tl.where((column % 2)[None, :] == 0, word >> 32, word & 0xFFFFFFFF).to(tl.int64)
    kept = half >= join(threshold_high, threshold_low)
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    scale = join_float(scale_high, scale_low)
    value = tl.load(x + place, mask=inside & kept, other=0)
    if IS_BFLOAT16:
        single = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        scaled = tl.where(kept, round_to_bfloat16(single * scale.to(tl.float32)), 0)
    else:
        scaled = tl.where(kept, value * scale.to(value.dtype), 0)
    tl.store(out + place, scaled, mask=inside)


def scale_kept(x: Tensor, row_keys: Tensor, threshold: int, scale: float, out: Tensor) -> None:
    """Write ``x * scale`` where an element stays and 0 elsewhere; see ``nn.dropout``.

    ``x`` and ``out``: contiguous [rows, columns] of float32, float64 or bfloat16. ``row_keys``: int64 [rows].
    ``threshold``: p * 2**32.
    """
    assert x.is_contiguous() and out.is_contiguous()
    num_rows, num_columns = x.shape
    rows, columns = tile_of(num_columns)
    is_bfloat16 = x.dtype == torch.bfloat16
    source, target = (t.view(torch.int16) if is_bfloat16 else t for t in (x, out))
    numbers = (num_rows, num_columns, *word_halves(threshold), *float_halves(scale))
    launch(
        dropout_kernel,
        (num_blocks(num_rows, rows), num_blocks(num_columns, columns)),
        (source, row_keys, *numbers, target),
        {"IS_BFLOAT16": is_bfloat16, "ROWS": rows, "COLUMNS": columns},
        (target,),
    )
