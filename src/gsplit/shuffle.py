"""The shuffle: hidden features cross between ranks, and their gradients go back (paper section 3, Algorithm 2).

Forward, at one layer, for a local tensor ``h`` of shape [num_local, D]:

    h_mixed = [h | rows received, grouped by owner]        [num_mixed, D]
    h_dst   = h[:num_dst]                                  [num_dst, D]

Rows sent to peer p are ``h[send_rows of p]``. Backward, from the gradients of both outputs:

    g = g_mixed[:num_local];  g[send_rows] += what the peers return of g_mixed;  g[:num_dst] += g_dst

Nothing is saved but the index. The incoming gradients are never written to: they may belong to another branch as
well. In a deterministic shuffle returned rows are added peer after peer, and for one peer no row comes twice, so no
sum depends on the order of threads. Every rank joins forward and backward, with no rows if it has none (law 5); an
output nobody used counts as a gradient of zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.blocks import ShuffleIndex
from gsplit.comm import Call, Comm

__all__ = ["add_returned", "gather_rows", "shuffle"]


def gather_rows(h: Tensor, index: ShuffleIndex) -> Tensor:
    """The rows that leave, peer after peer."""
    return h.index_select(0, index.send_rows)


def add_returned(
    g_mixed: Tensor, g_dst: Tensor | None, returned: Tensor, index: ShuffleIndex, *, deterministic: bool
) -> Tensor:
    """The gradient of ``h`` from those of both outputs and the rows that peers returned."""
    g = g_mixed[: index.num_local].clone()
    if deterministic:
        for rows, part in zip(index.send_rows.split(index.send_counts), returned.split(index.send_counts), strict=True):
            g.index_add_(0, rows, part)
    else:
        g.index_add_(0, index.send_rows, returned)
    if g_dst is not None:
        g[: index.num_dst] += g_dst
    return g


class _Shuffle(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, index: ShuffleIndex, comm: Comm, call: Call, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.index, ctx.comm, ctx.call, ctx.deterministic = index, comm, call, deterministic
        ctx.like = h.new_empty(0)
        ctx.width = h.shape[1:]
        h_mixed = h.new_empty(index.num_mixed, *h.shape[1:])
        rows = gather_rows(h, index)
        arriving = comm.exchange(call, h_mixed[index.num_local :], rows, index.recv_counts, index.send_counts)
        h_mixed[: index.num_local].copy_(h)  # while the rows travel
        arriving.wait()
        return h_mixed, h_mixed.detach()[: index.num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        index: ShuffleIndex = ctx.index
        if g_mixed is None:
            g_mixed = ctx.like.new_zeros(index.num_mixed, *ctx.width)
        leaving = g_mixed[index.num_local :].contiguous()
        returned = g_mixed.new_empty(index.num_sent, *g_mixed.shape[1:])
        call = Call(f"{ctx.call.name} backward", ctx.call.step, ctx.call.layer)
        ctx.comm.exchange(call, returned, leaving, index.send_counts, index.recv_counts).wait()
        return add_returned(g_mixed, g_dst, returned, index, deterministic=ctx.deterministic), None, None, None, None


def shuffle(
    h: Tensor, index: ShuffleIndex, comm: Comm, call: Call, *, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Make the mixed tensor of a layer from this rank's rows; returns ``(h_mixed, h_dst)``. Every rank calls it."""
    assert h.size(0) == index.num_local, (h.shape, index.num_local)
    h_mixed, h_dst = _Shuffle.apply(h, index, comm, call, deterministic)  # type: ignore[no-untyped-call]
    return h_mixed, h_dst
