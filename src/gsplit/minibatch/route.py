"""Routes: how the source rows of one layer reach the ranks that read them.

A layer computes its destinations from the mixed frontier: this rank's own rows and rows of other ranks. A route is made
while a mini-batch is sampled (``split``) and says which own rows are sent to whom, how many arrive from whom, and where
rows land. ``shuffle`` moves rows along it and gradients back. There are two kinds:

- A shuffle, where no place is given (law 4): own rows first, in their order, received rows appended, owner after owner.

      mixed = [local frontier | rows received]        destinations = the first rows of both

- A boundary, with ``own_places`` and ``recv_places``: the rank's own micro-batch reads rows that their owners have
  computed or loaded, in the micro-batch's order. Its own rows are a prefix of the local frontier.

A third kind is for stored features alone: a shuffle without the rows that the receiver has a copy of (``copied``).
A layer whose rows the rank has itself needs no route.

What a step sends is counted here too (law 7), with the backward pass, gradients and losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gsplit.features.copies import ForeignCopies
from gsplit.telemetry import StepTelemetry

__all__ = ["CopiedRows", "Route", "count_exchange", "count_reduction", "count_sample", "skip_replicated_rows"]

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows that this rank has copies of: ``rows`` of ``copies`` go to ``places`` of the mixed frontier."""

    copies: ForeignCopies
    rows: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """How rows travel at one layer, as one rank sees it; see the module.

    ``send_rows`` are rows of the local frontier, peer after peer, ``send_counts[p]`` of them to rank p, unique per
    peer. ``recv_counts[p]`` rows arrive from rank p. ``num_local`` rows are this rank's own; ``num_dst`` are the
    layer's destinations. ``own_places``: where the first own rows land in the mixed frontier; None: they stay where
    they are. ``recv_places``: where received rows land; None: behind the own ones.

    >>> Route(torch.tensor([1]), (0, 1), (0, 1), num_local=2, num_dst=1).num_mixed  # rank 0 of the example in ``split``
    3
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_local: int
    num_dst: int
    own_places: Tensor | None = None
    recv_places: Tensor | None = None
    copied: CopiedRows | None = None

    @property
    def num_sent(self) -> int:
        return self.send_rows.numel()

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    @property
    def num_copied(self) -> int:
        return 0 if self.copied is None else self.copied.rows.numel()

    @property
    def num_own(self) -> int:
        """Own rows that this rank reads itself: all of them in a shuffle."""
        return self.num_local if self.own_places is None else self.own_places.numel()

    @property
    def num_mixed(self) -> int:
        """Rows of the mixed frontier."""
        return self.num_own + self.num_received + self.num_copied

    @property
    def num_buffer(self) -> int:
        """Rows of a tensor with the own rows in front, in which stored rows are exchanged in place if they can be."""
        return self.num_mixed if self.own_places is None else self.num_local

    @property
    def appends(self) -> bool:
        """Whether received rows are appended to the own ones: a shuffle."""
        return self.own_places is None and self.recv_places is None

    @property
    def destinations_are_local(self) -> bool:
        """Whether the destinations are also the first rows of the local frontier."""
        return self.own_places is None


def skip_replicated_rows(route: Route, input_ids: Tensor, foreign_ids: Tensor, copies: ForeignCopies) -> Route:
    """The route of stored features along ``route``, without the rows that the receiver has a copy of.

    ``input_ids`` are the vertices of the local frontier, ``foreign_ids`` those of the rows received, owner after owner.
    Only the array that was copied can be exchanged along it.
    """
    leaving = ~copies.prefixes.hold(input_ids[route.send_rows])
    copied = copies.prefixes.hold(foreign_ids)
    places = route.num_local + torch.arange(foreign_ids.numel(), device=foreign_ids.device)
    return Route(
        send_rows=route.send_rows[leaving],
        send_counts=_count_kept(leaving, route.send_counts),
        recv_counts=_count_kept(~copied, route.recv_counts),
        num_local=route.num_local,
        num_dst=route.num_dst,
        recv_places=places[~copied],
        copied=CopiedRows(copies, rows=copies.places_of(foreign_ids[copied]), places=places[copied]),
    )


def count_sample(asked: Sequence[Route], travelled: Sequence[Route | None], telemetry: StepTelemetry) -> None:
    """Count what sampling found (law 7): ids that were asked for along routes, and rows that travel in the step.

    Per route the numbers of ids and then the ids are sent to the owners. A row is counted once, when it travels
    forward; ``count_exchange`` counts its bytes, those of its gradient included.
    """
    for route in asked:
        num_peers = len(route.send_counts) - 1
        telemetry.count("bytes_sent", _ID_BYTES * (num_peers + route.num_received))
        telemetry.count("bytes_received", _ID_BYTES * (num_peers + route.num_sent))
        telemetry.count("collectives", 2)
    rows = [route for route in travelled if route is not None]
    telemetry.count("rows_sent", sum(route.num_sent for route in rows))
    telemetry.count("rows_received", sum(route.num_received for route in rows))
    if any(route.copied is not None for route in rows):
        telemetry.count("rows_copied", sum(route.num_copied for route in rows))


def count_exchange(route: Route, rows: Tensor, telemetry: StepTelemetry, *, backward: bool = False) -> None:
    """Count an exchange of rows like these along a route (law 7); backward, gradients go the other way."""
    row_bytes = prod(rows.shape[1:]) * rows.element_size()  # also of a rank without rows
    sent, received = route.num_sent, route.num_received
    if backward:
        sent, received = received, sent
    telemetry.count("bytes_sent", sent * row_bytes)
    telemetry.count("bytes_received", received * row_bytes)
    telemetry.count("collectives", 1)


def count_reduction(num_bytes: int, num_ranks: int, telemetry: StepTelemetry) -> None:
    """Count an all-reduce (law 7), such as of a loss or of gradients: a ring sends 2 (W - 1) / W of its bytes."""
    moved = 2 * (num_ranks - 1) * num_bytes // num_ranks
    telemetry.count("bytes_sent", moved)
    telemetry.count("bytes_received", moved)
    telemetry.count("collectives", 1)


def _count_kept(kept: Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """How many are kept of each peer's rows, which lie one peer after the other."""
    return tuple(torch.stack([piece.sum() for piece in kept.split(counts)]).tolist())  # device sync
