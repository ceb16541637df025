"""What the attention kernels of ``gat`` and ``gatv2`` have in common."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.triton.words import float_halves

__all__ = ["REALS", "Sums", "attention_of", "edge_tile", "leaky_relu", "option_args"]

Sums = tuple[Tensor, Tensor]
"""The largest score and the sum of exponentials of every destination and head, [D, H] each."""
REALS = ("slope_high", "slope_low", "scale_high", "scale_low")
"""Arguments whose value must not decide how a kernel is compiled."""


@triton.jit
def leaky_relu(raw, slope):
    """``raw`` where it is positive, else ``slope * raw``."""
    return tl.where(raw > 0, raw, raw * slope)


@triton.jit
def attention_of(score, top, total, inside):
    """alpha of some edges, 0 for those that are not there."""
    return tl.where(inside, tl.exp(score - top) / (total + 1e-16), 0)


def edge_tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """EDGES and COLUMNS of a tile: all columns of a head, and as many edges as make 1 KiB of numbers."""
    columns = 1 << max(0, width - 1).bit_length()
    return {"EDGES": max(1, 1024 // (columns * dtype.itemsize)), "COLUMNS": columns}


def option_args(options: AttentionOptions, like: Tensor) -> tuple[Tensor | int, ...]:
    """The mask, or any tensor if nothing is dropped, and two reals."""
    keep = like if options.keep is None else options.keep.contiguous().view(torch.uint8)
    return keep, *float_halves(options.negative_slope), *float_halves(options.scale)
