"""Dropout by key: the mask of an element is a hash of its vertex or edge, so it is the same on any number of ranks.

Element (row, column) of a call is dropped if 32 bits of hash(row key, column // 2) are below p * 2**32; even columns
use the high half of the hash, odd ones the low half. The row key identifies the vertex or the edge of the row
(``nn.forward_pass``). Three versions give identical bits: compiled on the host, a Triton kernel on devices that have
it, torch operations elsewhere. Only the row keys are saved for backward.

    forward:  out = x * mask / (1 - p)                    x, out: [rows, ...]
    backward: g   = g_out * mask / (1 - p)                the mask is recomputed
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.kernels.csr import destination_rows
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.jit import kernel
from gsplit.keys import kernels_torch
from gsplit.keys.kernels_numba import mix

__all__ = ["keyed_dropout", "keyed_edge_mask", "keyed_mask"]

_HALF = 1 << 32
_SHIFT, _LOW, _ONE = np.uint64(32), np.uint64(_HALF - 1), np.uint64(1)


def keyed_mask(row_keys: Tensor, num_columns: int, p: float) -> Tensor:
    """True where an element is kept; [rows, columns]."""
    pairs = torch.arange((num_columns + 1) // 2, device=row_keys.device)
    words = kernels_torch.mix(row_keys.unsqueeze(1), pairs)
    halves = torch.stack([(words >> 32) & (_HALF - 1), words & (_HALF - 1)], dim=2)
    return halves.flatten(1)[:, :num_columns] >= int(p * _HALF)


@kernel
def _scale_kept(
    x: npt.NDArray[Any], row_keys: npt.NDArray[np.uint64], threshold: np.uint64, scale: float, out: npt.NDArray[Any]
) -> None:
    columns = x.shape[1]
    for row in range(x.shape[0]):
        key = row_keys[row]
        source = x[row]
        target = out[row]
        for pair in range(columns // 2):
            word = mix(key, np.uint64(pair))
            target[2 * pair] = source[2 * pair] * scale if word >> _SHIFT >= threshold else 0
            target[2 * pair + 1] = source[2 * pair + 1] * scale if word & _LOW >= threshold else 0
        if columns % 2:
            word = mix(key, np.uint64(columns // 2))
            target[columns - 1] = source[columns - 1] * scale if word >> _SHIFT >= threshold else 0


def _apply(x: Tensor, row_keys: Tensor, p: float) -> Tensor:
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # not a view, which could not be modified in place
    if not x.numel():
        return out
    flat = x.detach().reshape(x.size(0), -1)
    chosen = kernel_for("dropout", x.device, x.dtype)
    if chosen == "numba":
        keys = row_keys.numpy().view(np.uint64)
        _scale_kept(
            flat.contiguous().numpy(),
            keys,
            np.uint64(int(p * _HALF)),
            x.numpy(force=True).dtype.type(scale),
            out.view(flat.shape).numpy(),
        )
    elif chosen == "triton":
        from gsplit.kernels.triton.dropout import scale_kept

        scale_kept(flat.contiguous(), row_keys, int(p * _HALF), scale, out.view(flat.shape))
    else:
        torch.where(keyed_mask(row_keys, flat.size(1), p), flat * scale, flat.new_zeros(()), out=out.view(flat.shape))
    return out


@kernel
def _keep(
    dst_keys: npt.NDArray[np.uint64],
    indptr: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    threshold: np.uint64,
    out: npt.NDArray[np.bool_],
) -> None:
    for i in range(dst_keys.size):
        for e in range(indptr[i], indptr[i + 1]):
            key = mix(dst_keys[i], np.uint64(places[e]))
            word = np.uint64(0)
            for column in range(out.shape[1]):
                if column % 2:
                    out[e, column] = word & _LOW >= threshold
                else:
                    word = mix(key, np.uint64(column // 2))
                    out[e, column] = word >> _SHIFT >= threshold


def keyed_edge_mask(dst_keys: Tensor, indptr: Tensor, places: Tensor, num_columns: int, p: float) -> Tensor:
    """``keyed_mask`` of edges grouped by destination; an edge's key is made of its destination's key and its place."""
    if places.device.type != "cpu":
        dst_rows = destination_rows(indptr, places.numel())
        return keyed_mask(kernels_torch.mix(dst_keys[dst_rows], places), num_columns, p)
    out = torch.empty(places.numel(), num_columns, dtype=torch.bool)
    keys = dst_keys.numpy().view(np.uint64)
    _keep(keys, indptr.numpy(), places.numpy(), np.uint64(int(p * _HALF)), out.numpy())
    return out


class _KeyedDropout(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_keys: Tensor, p: float) -> Tensor:
        ctx.row_keys = row_keys
        ctx.p = p
        return _apply(x, row_keys, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(g, ctx.row_keys, ctx.p), None, None


def keyed_dropout(x: Tensor, row_keys: Tensor, p: float) -> Tensor:
    """``x`` with elements dropped by key and the rest scaled; one key per row."""
    out: Tensor = _KeyedDropout.apply(x, row_keys, p)  # type: ignore[no-untyped-call]
    return out
