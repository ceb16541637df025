"""Partial sums: the bottom layer on some columns of the features, summed where the rows are needed (P3's push-pull).

Every rank holds some columns of ALL input rows and computes, for the level-1 vertices of all ranks' micro-batches, what
its columns contribute to the bottom layer's output. That layer must be linear in its input. The contributions to a
rank's own micro-batch are sent to it by all ranks, itself included, and added up:

    forward:  out = sum over ranks p of partial_p[rows of this rank's micro-batch]             [num_out, H]
    backward: every rank gets g_out of every micro-batch; g_partial[send_rows] += g_out of each

Stands in the place of an exchange at layer 0, behind the layer instead of before it. Refuses hand-written models, which
would have to compute on columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.distributed.comm import Call, Comm
from gsplit.errors import InputError, explain
from gsplit.kernels.buffers import BufferPool

__all__ = ["PartialSums"]


class _Sum(torch.autograd.Function):
    """See the module. Nothing is saved but the rows."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, sums: "PartialSums") -> Tensor:
        ctx.sums, ctx.shape = sums, partial.shape
        width, comm = partial.shape[1:], sums.comm
        sent = comm.send_buffer((sums.send_rows.numel(), *width), partial.dtype)
        torch.index_select(partial, 0, sums.send_rows, out=sent)
        received = sums.pool.empty((comm.size * sums.num_out, *width), partial.dtype)
        counts = (sums.num_out,) * comm.size
        comm.all_to_all(sums.call("partial sums"), received, sent, counts, sums.send_counts).wait()
        return received.view(comm.size, sums.num_out, *width).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        sums, width = ctx.sums, ctx.shape[1:]
        comm, counts = sums.comm, (sums.num_out,) * sums.comm.size
        sent = comm.send_buffer((comm.size * sums.num_out, *width), g.dtype)
        sent.view(comm.size, sums.num_out, *width).copy_(g)
        received = sums.pool.empty((sums.send_rows.numel(), *width), g.dtype)
        comm.all_to_all(sums.call("partial sums backward"), received, sent, sums.send_counts, counts).wait()
        partial = g.new_zeros(ctx.shape)
        for rows, part in zip(sums.send_rows.split(sums.send_counts), received.split(sums.send_counts), strict=True):
            partial.index_add_(0, rows, part)
        return partial, None


@dataclass(frozen=True, slots=True)
class PartialSums:
    """See the module, and ``exchange.Exchange``, whose numbers are those of the rows that the layer computes on.

    ``send_rows``: destinations of the bottom block, peer after peer, ``send_counts[p]`` of them read by rank p's
    micro-batch. ``num_out``: rows of this rank's own. The rank has columns ``first_column`` to ``stop_column - 1`` of
    ``num_columns``.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    num_out: int
    num_local: int
    num_dst: int
    first_column: int
    stop_column: int
    num_columns: int
    comm: Comm
    step: int
    pool: BufferPool

    num_collectives = 1
    destinations_are_local = True

    @property
    def num_input(self) -> int:
        return self.num_local

    @property
    def num_mixed(self) -> int:
        return self.num_local

    @property
    def num_buffer(self) -> int:
        return self.num_local

    @property
    def num_sent(self) -> int:
        own = self.send_counts[self.comm.rank]
        return self.send_rows.numel() - own

    @property
    def num_received(self) -> int:
        return (self.comm.size - 1) * self.num_out

    def call(self, name: str) -> Call:
        """What a collective is for."""
        return Call(name, self.step, 0)

    def sum(self, partial: Tensor) -> Tensor:
        """Rows of this rank's micro-batch from what every rank computed on its columns; differentiable."""
        out: Tensor = _Sum.apply(partial, self)  # type: ignore[no-untyped-call]
        return out

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        fix = "wrap a PyG model with gsplit.parallelize, or use another strategy"
        raise InputError(
            explain("batch.shuffle", "a strategy with whole input rows", "push_pull, which has columns of them", fix)
        )

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        return buffer
