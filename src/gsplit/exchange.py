"""Exchanges: what stands between two layers of a mini-batch and turns a rank's own rows into the rows a layer reads.

A layer computes its destinations from the mixed frontier (law 4). How the mixed rows come about is the strategy's
choice, and the layer's exchange knows it: nothing travels (``IdentityExchange``), rows are shuffled between the ranks
of a replica (``ShuffleExchange``), or the loader has exchanged them already (``PremixedExchange``, for stored features,
which carry no gradient). Models and the forward pass see this protocol and never a strategy.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import Call, Comm
from gsplit.kernels.buffers import BufferPool
from gsplit.shuffle import keep_prefix, shuffle

__all__ = ["Exchange", "IdentityExchange", "PremixedExchange", "ShuffleExchange", "mix_rows"]


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
        """Destinations of the layer, which are the first rows."""

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

    def fill_received(self, mixed: Tensor, purpose: str) -> None:
        """Receive the rows of other ranks into the tail of a tensor whose first ``num_local`` rows are there."""


def mix_rows(exchange: Exchange, rows: Tensor, purpose: str) -> Tensor:
    """The mixed tensor of rows that carry no gradient, such as ids, from the own ones. A collective."""
    mixed = rows.new_empty(exchange.num_mixed, *rows.shape[1:])
    mixed[: exchange.num_local] = rows[: exchange.num_local]
    exchange.fill_received(mixed, purpose)
    return mixed


@dataclass(frozen=True, slots=True)
class IdentityExchange:
    """Nothing travels: the rank has all rows of the layer itself."""

    num_local: int
    num_dst: int

    num_sent = num_received = num_collectives = 0

    @property
    def num_input(self) -> int:
        return self.num_local

    @property
    def num_mixed(self) -> int:
        return self.num_local

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return keep_prefix(h, self.num_dst)

    def fill_received(self, mixed: Tensor, purpose: str) -> None:
        """See ``Exchange``: nothing is received."""


@dataclass(frozen=True, slots=True)
class ShuffleExchange:
    """Rows cross between the ranks of a replica, along the layer's shuffle index."""

    index: ShuffleIndex
    comm: Comm
    step: int
    layer: int
    pool: BufferPool
    deterministic: bool

    num_collectives = 1

    @property
    def num_input(self) -> int:
        return self.index.num_local

    @property
    def num_local(self) -> int:
        return self.index.num_local

    @property
    def num_mixed(self) -> int:
        return self.index.num_mixed

    @property
    def num_dst(self) -> int:
        return self.index.num_dst

    @property
    def num_sent(self) -> int:
        return self.index.num_sent

    @property
    def num_received(self) -> int:
        return self.index.num_received

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor]:
        call = Call("shuffle", self.step, self.layer)
        return shuffle(h, self.index, self.comm, call, self.pool, deterministic=self.deterministic)

    def fill_received(self, mixed: Tensor, purpose: str) -> None:
        index = self.index
        rows = self.comm.send_buffer((index.num_sent, *mixed.shape[1:]), mixed.dtype)
        torch.index_select(mixed[: index.num_local], 0, index.send_rows, out=rows)
        call, tail = Call(purpose, self.step, self.layer), mixed[index.num_local :]
        self.comm.all_to_all(call, tail, rows, index.recv_counts, index.send_counts).wait()


@dataclass(frozen=True, slots=True)
class PremixedExchange:
    """The rows that ``mix`` takes are mixed already; other rows of the layer cross as ``inner`` says."""

    inner: Exchange

    num_sent = num_received = num_collectives = 0

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

    def fill_received(self, mixed: Tensor, purpose: str) -> None:
        self.inner.fill_received(mixed, purpose)
