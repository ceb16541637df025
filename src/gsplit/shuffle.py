"""The shuffle: hidden features cross between ranks, and their gradients go back (paper section 3, Algorithm 2).

Forward, at one layer, for a local tensor ``h`` of shape [num_local, D]:

    h_mixed = [h | rows received, grouped by owner]        [num_mixed, D]
    h_dst   = h[:num_dst]                                  [num_dst, D]

Rows sent to peer p are ``h[send_rows of p]``. Backward, from the gradients of both outputs:

    g = g_mixed[:num_local];  g[send_rows] += what the peers return of g_mixed;  g[:num_dst] += g_dst

Nothing is saved but the index. The incoming gradients are never written to: they may belong to another branch as well.
In a deterministic shuffle returned rows are added peer after peer, and for one peer no row comes twice, so no sum
depends on the order of threads; with compiled kernels every shuffle is deterministic. Every rank joins forward and
backward, with no rows if it has none (law 5); an output nobody used counts as a gradient of zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import Call, Comm
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import copy_and_gather, merge_gradient

__all__ = ["keep_prefix", "merge_gradients", "shuffle", "fill_mixed"]


def fill_mixed(h: Tensor, index: ShuffleIndex, sent: Tensor, pool: BufferPool) -> Tensor:
    """The mixed tensor with its own part filled; ``sent`` gets the rows that leave, peer after peer."""
    mixed = pool.empty((index.num_mixed, *h.shape[1:]), h.dtype)
    own = mixed[: index.num_local]
    chosen = kernel_for("move rows", h.device, h.dtype)
    if chosen == "numba":
        copy_and_gather(h, index.send_rows, own, sent)
    elif chosen == "triton":
        from gsplit.kernels.triton import rows as device

        device.copy_and_gather(h, index.send_rows, own, sent)
    else:
        own.copy_(h)
        torch.index_select(h.detach(), 0, index.send_rows, out=sent)
    return mixed


def merge_gradients(
    g_mixed: Tensor,
    g_dst: Tensor | None,
    returned: tuple[Tensor, ...],
    index: ShuffleIndex,
    pool: BufferPool,
    *,
    deterministic: bool,
) -> Tensor:
    """The gradient of ``h`` from those of both outputs and the rows that peers returned, in one or several pieces."""
    g = pool.empty((index.num_local, *g_mixed.shape[1:]), g_mixed.dtype)
    chosen, g_first = kernel_for("move rows", g.device, g.dtype), g_mixed[:0] if g_dst is None else g_dst
    if chosen == "numba":
        merge_gradient(g_mixed, g_first, index.send_rows, returned, g)
        return g
    rows_returned = returned[0] if len(returned) == 1 else torch.cat(returned)
    if chosen == "triton":
        from gsplit.kernels.triton import rows as device

        device.merge_gradient(g_mixed, g_first, index.send_rows, rows_returned, g)
        return g
    g.copy_(g_mixed[: index.num_local])
    parts = index.send_counts if deterministic else (index.num_sent,)
    for rows, part in zip(index.send_rows.split(parts), rows_returned.split(parts), strict=True):
        g.index_add_(0, rows, part)
    if g_dst is not None:
        g[: index.num_dst] += g_dst
    return g


def _send_back(g: Tensor, index: ShuffleIndex, comm: Comm, call: Call, pool: BufferPool) -> tuple[Tensor, ...]:
    """Return the gradients of received rows to their owners; what peers return is left in place where that will do."""
    if kernel_for("move rows", g.device, g.dtype) == "numba":
        return comm.all_to_all_views(call, g, index.send_counts, index.recv_counts)
    returned = pool.empty((index.num_sent, *g.shape[1:]), g.dtype)
    comm.all_to_all(call, returned, g, index.send_counts, index.recv_counts).wait()
    return (returned,)


class _Shuffle(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, index: ShuffleIndex, comm: Comm, call: Call, pool: BufferPool, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.index, ctx.comm, ctx.call, ctx.pool, ctx.deterministic = index, comm, call, pool, deterministic
        ctx.like = h.new_empty(0)
        ctx.width = h.shape[1:]
        sent = comm.send_buffer((index.num_sent, *h.shape[1:]), h.dtype)
        h_mixed = fill_mixed(h, index, sent, pool)
        received = h_mixed[index.num_local :]
        comm.all_to_all(call, received, sent, index.recv_counts, index.send_counts).wait()
        return h_mixed, h_mixed.detach()[: index.num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        index: ShuffleIndex = ctx.index
        if g_mixed is None:
            g_mixed = ctx.like.new_zeros(index.num_mixed, *ctx.width)
        g_mixed = g_mixed.contiguous()
        call = Call(f"{ctx.call.name} backward", ctx.call.step, ctx.call.layer)
        returned = _send_back(g_mixed[index.num_local :], index, ctx.comm, call, ctx.pool)
        g = merge_gradients(g_mixed, g_dst, returned, index, ctx.pool, deterministic=ctx.deterministic)
        return g, None, None, None, None, None


class _KeepPrefix(torch.autograd.Function):
    """The shuffle where nothing travels: h -> (h, h[:num_dst]) without a copy. Backward: g_mixed + [g_dst | 0]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.num_dst, ctx.shape = num_dst, h.shape
        return h.detach(), h.detach()[:num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        if g_dst is None:
            return g_mixed, None
        g = g_dst.new_zeros(ctx.shape) if g_mixed is None else g_mixed.clone()
        g[: ctx.num_dst] += g_dst
        return g, None


def keep_prefix(h: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """``(h, h[:num_dst])`` whose backward makes no zero-filled temporary; the mixed frontier is ``h`` itself."""
    if not h.requires_grad:
        return h, h[:num_dst]
    h_mixed, h_dst = _KeepPrefix.apply(h, num_dst)  # type: ignore[no-untyped-call]
    return h_mixed, h_dst


def shuffle(
    h: Tensor, index: ShuffleIndex, comm: Comm, call: Call, pool: BufferPool, *, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Make the mixed tensor of a layer from this rank's rows; returns ``(h_mixed, h_dst)``. Every rank calls it."""
    assert h.size(0) == index.num_local, (h.shape, index.num_local)
    if comm.size == 1:
        return keep_prefix(h, index.num_dst)
    h_mixed, h_dst = _Shuffle.apply(h, index, comm, call, pool, deterministic)  # type: ignore[no-untyped-call]
    return h_mixed, h_dst
