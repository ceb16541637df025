"""Exchanges: what stands between two layers of a mini-batch and turns a rank's own rows into the rows a layer reads.

A layer computes its destinations from the mixed frontier (law 4). How the mixed rows come about is the strategy's
choice, and the layer's exchange knows it: nothing travels (``IdentityExchange``), rows are shuffled between the ranks
of a replica (``ShuffleExchange``), those are left out that the receiver has a copy of (``CopiedExchange``, for stored
features in the loader), or the loader has exchanged them already (``PremixedExchange``, for stored features, which
carry no gradient). Another stands in a file of its own: ``boundary``. Models and the forward pass
see this protocol and never a strategy.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import Call, Comm
from gsplit.features.copies import ForeignCopies
from gsplit.kernels.buffers import BufferPool
from gsplit.shuffle import keep_prefix, shuffle

__all__ = [
    "CopiedExchange",
    "Exchange",
    "IdentityExchange",
    "PremixedExchange",
    "ShuffleExchange",
    "leave_out_copies",
    "mix_rows",
]


class Exchange(Protocol):
    """One layer's exchange on one rank. Its methods are collectives: all ranks of the replica call them."""

    @property
    def num_input(self) -> int:
        """Rows that ``mix`` takes."""

    @property
    def num_local(self) -> int:
        """Rows of the local frontier: this rank's own."""

    @property
    def num_mixed(self) -> int:
        """Rows of the mixed frontier, the own ones first."""

    @property
    def num_dst(self) -> int:
        """Destinations of the layer, which are the first rows of the mixed frontier."""

    @property
    def destinations_are_local(self) -> bool:
        """Whether the destinations are also the first rows of the local frontier."""

    @property
    def num_sent(self) -> int:
        """Rows that ``mix`` sends to other ranks."""

    @property
    def num_received(self) -> int:
        """Rows that ``mix`` receives."""

    @property
    def num_collectives(self) -> int:
        """Collectives that ``mix`` takes."""

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """``(h_mixed, h_dst)`` from this rank's rows; differentiable."""

    @property
    def num_buffer(self) -> int:
        """Rows of the tensor that ``mix_stored`` takes: more than the own ones where it receives into its tail."""

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        """The mixed tensor of rows that carry no gradient, of which ``buffer`` has the own ones, first; may be it."""


def mix_rows(exchange: Exchange, rows: Tensor, purpose: str) -> Tensor:
    """The mixed tensor of rows that carry no gradient, such as ids, from the own ones. A collective."""
    buffer = rows.new_empty(exchange.num_buffer, *rows.shape[1:])
    buffer[: exchange.num_local] = rows[: exchange.num_local]
    return exchange.mix_stored(buffer, purpose)


@dataclass(frozen=True, slots=True)
class IdentityExchange:
    """Nothing travels: the rank has all rows of the layer itself."""

    num_local: int
    num_dst: int

    num_sent = num_received = num_collectives = 0
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

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return keep_prefix(h, self.num_dst)

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        return buffer


class _AlongIndex:
    """What exchanges along a shuffle index share: numbers of rows, and how those that leave are sent."""

    __slots__ = ()
    index: ShuffleIndex
    comm: Comm

    num_collectives = 1
    destinations_are_local = True

    @property
    def num_input(self) -> int:
        return self.index.num_local

    @property
    def num_local(self) -> int:
        return self.index.num_local

    @property
    def num_dst(self) -> int:
        return self.index.num_dst

    @property
    def num_sent(self) -> int:
        return self.index.num_sent

    @property
    def num_received(self) -> int:
        return self.index.num_received

    def _exchange_rows(self, mixed: Tensor, received: Tensor, call: Call) -> None:
        """Send own rows of ``mixed``, and receive into ``received``. A collective."""
        index = self.index
        rows = self.comm.send_buffer((index.num_sent, *mixed.shape[1:]), mixed.dtype)
        torch.index_select(mixed[: index.num_local], 0, index.send_rows, out=rows)
        self.comm.all_to_all(call, received, rows, index.recv_counts, index.send_counts).wait()


@dataclass(frozen=True, slots=True)
class ShuffleExchange(_AlongIndex):
    """Rows cross between the ranks of a replica, along the layer's shuffle index."""

    index: ShuffleIndex
    comm: Comm
    step: int
    layer: int
    pool: BufferPool
    deterministic: bool

    @property
    def num_mixed(self) -> int:
        return self.index.num_mixed

    @property
    def num_buffer(self) -> int:
        return self.index.num_mixed

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        call = Call("shuffle", self.step, self.layer)
        return shuffle(h, self.index, self.comm, call, self.pool, deterministic=self.deterministic)

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        self._exchange_rows(buffer, buffer[self.num_local :], Call(purpose, self.step, self.layer))
        return buffer


@dataclass(frozen=True, slots=True)
class CopiedExchange(_AlongIndex):
    """Stored features cross between the ranks, but for the rows that the receiver has a copy of.

    ``index`` is that of the rows that travel; they go to ``arriving_rows`` of the mixed frontier, and the copies at
    ``copied_places`` to ``copied_rows``. Only the array that the copies are of can be exchanged so.
    """

    index: ShuffleIndex
    num_mixed: int
    arriving_rows: Tensor
    copied_rows: Tensor
    copied_places: Tensor
    copies: ForeignCopies
    comm: Comm
    step: int
    pool: BufferPool

    @property
    def num_copied(self) -> int:
        """Rows that come from the copies instead."""
        return self.copied_places.numel()

    @property
    def num_buffer(self) -> int:
        return self.num_mixed

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.pool.empty((self.num_mixed, *h.shape[1:]), h.dtype)
        mixed[: self.num_local] = h
        self.mix_stored(mixed, "exchange features")
        return mixed, mixed[: self.num_dst]

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        received = self.pool.empty((self.num_received, *buffer.shape[1:]), buffer.dtype)
        self._exchange_rows(buffer, received, Call(purpose, self.step, 0))  # all ranks: once per step, copies or not
        buffer.index_copy_(0, self.arriving_rows, received)
        buffer.index_copy_(0, self.copied_rows, self.copies.rows.index_select(0, self.copied_places))
        return buffer


def leave_out_copies(
    index: ShuffleIndex,
    input_ids: Tensor,
    foreign_ids: Tensor,
    copies: ForeignCopies,
    comm: Comm,
    step: int,
    pool: BufferPool,
) -> CopiedExchange:
    """Layer 0's exchange of features along ``index``, without the rows that the receiver has.

    ``input_ids`` are the vertices of the local frontier, ``foreign_ids`` those of the rows received, owner after owner.
    """
    leaving, copied = ~copies.prefixes.hold(input_ids[index.send_rows]), copies.prefixes.hold(foreign_ids)
    travelling = ShuffleIndex(
        index.send_rows[leaving],
        _count_kept(leaving, index.send_counts),
        _count_kept(~copied, index.recv_counts),
        index.num_local,
        index.num_dst,
    )
    places = index.num_local + torch.arange(foreign_ids.numel(), device=foreign_ids.device)
    kept = (places[~copied], places[copied], copies.places_of(foreign_ids[copied]))
    return CopiedExchange(travelling, index.num_mixed, *kept, copies, comm, step, pool)


def _count_kept(kept: Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """How many are kept of each peer's rows, which lie one peer after the other."""
    return tuple(torch.stack([piece.sum() for piece in kept.split(counts)]).tolist())  # device sync


@dataclass(frozen=True, slots=True)
class PremixedExchange:
    """The rows that ``mix`` takes are mixed already; other rows of the layer cross as ``inner`` says."""

    inner: Exchange

    num_sent = num_received = num_collectives = 0
    destinations_are_local = True

    @property
    def num_input(self) -> int:
        return self.inner.num_mixed

    @property
    def num_local(self) -> int:
        return self.inner.num_local

    @property
    def num_mixed(self) -> int:
        return self.inner.num_mixed

    @property
    def num_dst(self) -> int:
        return self.inner.num_dst

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return keep_prefix(h, self.num_dst)

    @property
    def num_buffer(self) -> int:
        return self.inner.num_buffer

    def mix_stored(self, buffer: Tensor, purpose: str) -> Tensor:
        return self.inner.mix_stored(buffer, purpose)
