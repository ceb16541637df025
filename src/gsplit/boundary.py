"""The boundary of a hybrid step: rows pass from the ranks that own them to the ranks whose micro-batches read them.

Below the boundary a mini-batch is split: every vertex is computed (or its features are loaded) once, by its owner.
Above it every rank has a micro-batch of its own. ``ask_owners`` stands between the two halves of sampling: a rank asks
the owners for the vertices of its micro-batch's lowest frontier, and what it is asked for itself becomes the frontier
that is split further down. ``BoundaryExchange`` moves their rows, and the gradients back:

    forward:  h_mixed[own_places] = h[:num_own];  h_mixed[received_places] = rows received      [num_mixed, D]
              h_dst = h_mixed[:num_dst]
    backward: g[:num_own] = g_mixed[own_places];  g[send_rows] += what the peers return of g_mixed[received_places]

The owner's frontier begins with the vertices that its own micro-batch reads, in that micro-batch's order. Two ranks;
rank 0 owns 0..4, rank 1 owns 5..9. If rank 0's micro-batch reads [1, 3, 6] and rank 1's reads [7, 3, 8], the owners'
frontiers are [1, 3] and [7, 8, 6]; on rank 1 ``own_places`` is [0, 2] and ``received_places`` is [1], for vertex 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import Call, Comm
from gsplit.kernels.buffers import BufferPool
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import Frontier, LayerSampler
from gsplit.split import exchange_ids
from gsplit.telemetry import StepTelemetry

__all__ = ["BoundaryExchange", "BoundaryIndex", "ask_owners"]


@dataclass(frozen=True, slots=True)
class BoundaryIndex:
    """How rows cross the boundary: ``shuffle`` says which rows of the owner's frontier go to whom."""

    shuffle: ShuffleIndex
    own_places: Tensor
    received_places: Tensor

    @property
    def num_own(self) -> int:
        """Rows of the micro-batch that this rank owns: the first of its frontier."""
        return self.own_places.numel()

    @property
    def num_mixed(self) -> int:
        """Rows of the micro-batch's frontier."""
        return self.num_own + self.shuffle.num_received


def ask_owners(
    ids: Tensor,
    num_dst: int,
    layer: int,
    sampler: LayerSampler,
    ownership: Ownership,
    comm: Comm,
    key: StepKey,
    telemetry: StepTelemetry,
) -> tuple[Frontier, BoundaryIndex]:
    """Ask for the vertices of a micro-batch's frontier, the sources of ``layer``. A collective.

    Returns the frontier of own vertices that anybody asked for, open, and how their rows will travel.
    """
    rank = comm.rank
    with telemetry.span("split"):
        owners = ownership.owners(ids)
        own = owners == rank
        own_places, others = own.nonzero().view(-1), (~own).nonzero().view(-1)  # device sync
        received_places = others[torch.argsort(owners[others], stable=True)]
        counts = torch.bincount(owners[others], minlength=ownership.num_ranks).tolist()  # device sync
        foreign = ids[received_places]
    with telemetry.span("exchange_ids"):  # all ranks: once per step, empty or not
        asked_ids, asked_counts = exchange_ids(comm, key, layer, foreign, tuple(counts))
    with telemetry.span("split"):
        frontier = sampler.start(ids[own_places])
        send_rows = frontier.locate(asked_ids)
        shuffle = ShuffleIndex(send_rows, asked_counts, tuple(counts), frontier.num_rows, num_dst)
    return frontier, BoundaryIndex(shuffle, own_places, received_places)


def _carry(h: Tensor, index: BoundaryIndex, comm: Comm, call: Call, pool: BufferPool) -> Tensor:
    """The mixed rows of a micro-batch. A collective."""
    shuffle, width = index.shuffle, h.shape[1:]
    sent = comm.send_buffer((shuffle.num_sent, *width), h.dtype)
    torch.index_select(h, 0, shuffle.send_rows, out=sent)
    received = pool.empty((shuffle.num_received, *width), h.dtype)
    comm.all_to_all(call, received, sent, shuffle.recv_counts, shuffle.send_counts).wait()
    mixed = pool.empty((index.num_mixed, *width), h.dtype)
    mixed.index_copy_(0, index.own_places, h[: index.num_own])
    return mixed.index_copy_(0, index.received_places, received)


class _Cross(torch.autograd.Function):
    """See the module. Nothing is saved but the index."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, index: BoundaryIndex, comm: Comm, call: Call, pool: BufferPool, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.index, ctx.comm, ctx.call, ctx.pool, ctx.deterministic = index, comm, call, pool, deterministic
        ctx.like, ctx.width = h.new_empty(0), h.shape[1:]
        h_mixed = _carry(h.detach(), index, comm, call, pool)
        return h_mixed, h_mixed.detach()[: index.shuffle.num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        index: BoundaryIndex = ctx.index
        shuffle, pool = index.shuffle, ctx.pool
        if g_mixed is None:
            g_mixed = ctx.like.new_zeros(index.num_mixed, *ctx.width)
        if g_dst is not None:
            g_mixed = g_mixed.clone()  # it may belong to another branch as well
            g_mixed[: shuffle.num_dst] += g_dst
        call = Call(f"{ctx.call.name} backward", ctx.call.step, ctx.call.layer)
        sent = ctx.comm.send_buffer((shuffle.num_received, *ctx.width), g_mixed.dtype)
        torch.index_select(g_mixed, 0, index.received_places, out=sent)
        returned = pool.empty((shuffle.num_sent, *ctx.width), g_mixed.dtype)
        ctx.comm.all_to_all(call, returned, sent, shuffle.send_counts, shuffle.recv_counts).wait()
        g = pool.empty((shuffle.num_local, *ctx.width), g_mixed.dtype)
        torch.index_select(g_mixed, 0, index.own_places, out=g[: index.num_own])
        g[index.num_own :] = 0  # read by other ranks only
        parts = shuffle.send_counts if ctx.deterministic else (shuffle.num_sent,)
        for rows, part in zip(shuffle.send_rows.split(parts), returned.split(parts), strict=True):
            g.index_add_(0, rows, part)
        return g, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class BoundaryExchange:
    """See ``exchange.Exchange``: rows of the owners' frontiers become the rows of this rank's micro-batch."""

    index: BoundaryIndex
    comm: Comm
    step: int
    layer: int
    pool: BufferPool
    deterministic: bool

    num_collectives = 1
    destinations_are_local = False

    @property
    def num_input(self) -> int:
        return self.index.shuffle.num_local

    @property
    def num_local(self) -> int:
        return self.index.shuffle.num_local

    @property
    def num_buffer(self) -> int:
        return self.index.shuffle.num_local

    @property
    def num_mixed(self) -> int:
        return self.index.num_mixed

    @property
    def num_dst(self) -> int:
        return self.index.shuffle.num_dst

    @property
    def num_sent(self) -> int:
        return self.index.shuffle.num_sent

    @property
    def num_received(self) -> int:
        return self.index.shuffle.num_received

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        call = Call("boundary", self.step, self.layer)
        h_mixed, h_dst = _Cross.apply(h, self.index, self.comm, call, self.pool, self.deterministic)  # type: ignore[no-untyped-call]
        return h_mixed, h_dst

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        return _carry(buffer, self.index, self.comm, Call(purpose, self.step, self.layer), self.pool)
