"""Routes: how the source rows of one layer reach the ranks that read them.

A layer computes its destinations from the mixed frontier: rows of this rank and rows of other ranks. A ``Route`` is
made while a mini-batch is sampled (``split``). It lists the rows to send to each rank, the number of rows to receive
from each rank, and the places of the rows. ``shuffle`` moves rows along it, and gradients back. There are two kinds:

- A shuffle, without places (law 4). Own rows come first, in their order; received rows are appended, grouped by owner:

      mixed frontier = [local frontier | received rows]        destinations = the first rows of both

- A boundary, with ``own_places`` and ``recv_places``. A rank's own micro-batch reads rows that their owners computed or
  loaded, in the order of the micro-batch.

Between hosts, a rank also passes on rows to the ranks of its host (``Relay``, see ``relay``).

Stored features may also take a shuffle without the rows that the receiver has a copy of (``copied``). A layer whose
source rows are all computed by the rank itself has no route.

The functions here also count what a step sends (law 7).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gsplit.device.devices import copy_to_device
from gsplit.features.copies import ForeignCopies
from gsplit.telemetry import StepTelemetry

__all__ = [
    "CopiedRows",
    "Relay",
    "Route",
    "count_exchange",
    "count_kept",
    "count_reduction",
    "count_sample",
    "skip_copied_rows",
]

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows that this rank has copies of: row ``rows[i]`` of ``copies`` goes to ``places[i]`` of the mixed frontier."""

    copies: ForeignCopies
    rows: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Relay:
    """The rows of other hosts that a rank receives for the ranks of its host, itself included.

    ``ids``: their vertices, each once, ``far_counts[g]`` of them from host g. ``rows``: which of them to pass on,
    grouped by rank, ``near_counts[i]`` of them to rank i of the host.

    Two rows, both for rank 0 of the host and the second also for rank 1:

    >>> relay = Relay(torch.tensor([8, 9]), torch.tensor([0, 1, 1]), far_counts=(0, 2), near_counts=(2, 1))
    >>> of_nine = relay.keep(torch.tensor([False, True]))
    >>> of_nine.rows.tolist(), of_nine.far_counts, of_nine.near_counts
    ([0, 0], (0, 1), (1, 1))
    """

    ids: Tensor
    rows: Tensor
    far_counts: tuple[int, ...]
    near_counts: tuple[int, ...]

    def keep(self, kept: Tensor) -> "Relay":
        """The same without the rows that ``kept`` is False for."""
        passed_on = kept[self.rows]
        numbers = kept.cumsum(0) - 1
        return Relay(
            ids=self.ids[kept],
            rows=numbers[self.rows[passed_on]],
            far_counts=count_kept(kept, self.far_counts),
            near_counts=count_kept(passed_on, self.near_counts),
        )


@dataclass(frozen=True, slots=True)
class Route:
    """The exchange of rows at one layer, for one rank; see the module.

    ``send_rows`` are rows of the local frontier, grouped by receiver, ``send_counts[p]`` of them for rank p and unique
    per receiver. ``recv_counts[p]`` rows are received from rank p. The local frontier has ``num_local`` rows and the
    layer has ``num_dst`` destinations. ``own_places[i]`` is the place of local row i in the mixed frontier; None: local
    rows keep their places. ``recv_places``: the same for received rows; None: they are appended. ``relay``: what this
    rank passes on if rows are exchanged in two levels; ``send_rows`` are then grouped by the ranks of its host, and
    behind them by the hosts.

    Rank 1 of the example in ``split`` has the local frontier [7, 8, 6]. It sends row 2 (vertex 6) to rank 0 and
    receives one row (vertex 3) from it, so its mixed frontier is [7, 8, 6 | 3]:

    >>> Route(torch.tensor([2]), send_counts=(1, 0), recv_counts=(1, 0), num_local=3, num_dst=1).num_mixed
    4
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_local: int
    num_dst: int
    own_places: Tensor | None = None
    recv_places: Tensor | None = None
    copied: CopiedRows | None = None
    relay: Relay | None = None

    @property
    def num_sent(self) -> int:
        return self.send_rows.numel()

    @property
    def num_passed_on(self) -> int:
        """Rows of other hosts that this rank sends to the ranks of its host."""
        return 0 if self.relay is None else self.relay.rows.numel()

    @property
    def num_relayed(self) -> int:
        """The same rows where this rank receives them, each once."""
        return 0 if self.relay is None else self.relay.ids.numel()

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    @property
    def num_copied(self) -> int:
        return 0 if self.copied is None else self.copied.rows.numel()

    @property
    def num_own(self) -> int:
        """Local rows that this rank reads itself: all of them in a shuffle."""
        return self.num_local if self.own_places is None else self.own_places.numel()

    @property
    def num_mixed(self) -> int:
        """Rows of the mixed frontier."""
        return self.num_own + self.num_received + self.num_copied

    @property
    def num_buffer(self) -> int:
        """Rows of the buffer for ``exchange_stored``: those of the mixed frontier if local rows keep their places."""
        return self.num_mixed if self.own_places is None else self.num_local

    @property
    def appends(self) -> bool:
        """Whether received rows are appended to the local ones: a shuffle."""
        return self.own_places is None and self.recv_places is None

    @property
    def destinations_are_local(self) -> bool:
        """Whether the destinations are the first rows of the local frontier too (law 4); not at a boundary."""
        return self.own_places is None


def skip_copied_rows(route: Route, input_ids: Tensor, foreign_ids: Tensor, copies: ForeignCopies) -> Route:
    """The same route for stored features, without the rows that the receiver has a copy of.

    ``input_ids`` are the vertices of the local frontier, ``foreign_ids`` those of the received rows, on the host. Only
    the array that was copied can be exchanged along the result.
    """
    send_rows = route.send_rows
    device = send_rows.device
    leaving = ~copies.prefixes.hold(input_ids[send_rows].cpu())  # device sync, if a device samples
    copied = copies.prefixes.hold(foreign_ids)
    places = route.num_local + torch.arange(foreign_ids.numel())
    relay = route.relay
    if relay is not None:
        relay = relay.keep(copy_to_device(~copies.prefixes.hold(relay.ids.cpu()), device))
    return Route(
        send_rows=send_rows[copy_to_device(leaving.nonzero().view(-1), device)],
        send_counts=count_kept(leaving, route.send_counts),
        recv_counts=count_kept(~copied, route.recv_counts),
        num_local=route.num_local,
        num_dst=route.num_dst,
        recv_places=copy_to_device(places[~copied], device),
        copied=CopiedRows(
            copies=copies,
            rows=copy_to_device(copies.places_of(foreign_ids[copied]), device),
            places=copy_to_device(places[copied], device),
        ),
        relay=relay,
    )


def count_sample(asked: Sequence[Route], exchanged: Sequence[Route | None], telemetry: StepTelemetry) -> None:
    """Count the exchanges of ids of a step, and the rows that its forward pass exchanges (law 7).

    Each route in ``asked`` took one exchange of counts and one of ids, in each level. Each row is counted once, for the
    forward pass, or once in each level; ``count_exchange`` counts the bytes of rows and of their gradients.
    """
    for route in asked:
        num_counts = len(route.recv_counts) - 1  # in two levels too: (ranks - 1) * hosts, and hosts - 1
        telemetry.count("bytes_sent", _ID_BYTES * (num_counts + route.num_received + route.num_relayed))
        telemetry.count("bytes_received", _ID_BYTES * (num_counts + route.num_sent + route.num_passed_on))
        telemetry.count("collectives", 2 if route.relay is None else 4)
    rows = [route for route in exchanged if route is not None]
    telemetry.count("rows_sent", sum(route.num_sent + route.num_passed_on for route in rows))
    telemetry.count("rows_received", sum(route.num_received + route.num_relayed for route in rows))
    if any(route.copied is not None for route in rows):
        telemetry.count("rows_copied", sum(route.num_copied for route in rows))


def count_exchange(route: Route, rows: Tensor, telemetry: StepTelemetry, *, backward: bool = False) -> None:
    """Count an exchange of such rows along a route (law 7). In the backward pass gradients go the other way."""
    row_bytes = prod(rows.shape[1:]) * rows.element_size()  # also right for a tensor without rows
    there = route.num_sent + route.num_passed_on
    back = route.num_received + route.num_relayed
    telemetry.count("bytes_sent", (back if backward else there) * row_bytes)
    telemetry.count("bytes_received", (there if backward else back) * row_bytes)
    telemetry.count("collectives", 1 if route.relay is None else 2)


def count_reduction(num_bytes: int, num_ranks: int, telemetry: StepTelemetry) -> None:
    """Count an all-reduce, such as of a loss (law 7). Each of W ranks in a ring sends 2 (W - 1) / W of its bytes."""
    moved = 2 * (num_ranks - 1) * num_bytes // num_ranks
    telemetry.count("bytes_sent", moved)
    telemetry.count("bytes_received", moved)
    telemetry.count("collectives", 1)


def count_kept(kept: Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The number of kept rows per peer, for rows grouped by peer."""
    return tuple(torch.stack([piece.sum() for piece in kept.split(counts)]).tolist())  # device sync, if they are there
