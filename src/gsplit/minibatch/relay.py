"""Exchanges between hosts: a row that several ranks of a host need is sent to that host once.

Rank i of a host relays between its host and rank i of every other host. What its host needs from them, it requests,
receives and passes on to the ranks of its host, which exchange through shared memory. Of gradients, it adds up what
these return for a row, rank after rank, and sends the sum to the row's owner. So a rank exchanges with the other ranks
of its host and with one rank of every other host, not with all ranks, and sums are made in a fixed order.

Example: two hosts with two ranks each. Ranks 0 and 1 both need vertex 8 of rank 2, with which rank 0 exchanges:

    ids         rank 0 and rank 1 -> rank 0 (each a request for 8), rank 0 -> rank 2 (one request)
    rows        rank 2 -> rank 0 (one row), rank 0 -> rank 0 and rank 1 (one each)
    gradients   rank 0 and rank 1 -> rank 0 (two rows), rank 0 -> rank 2 (their sum)

The received rows of a rank are grouped by owner, as in an exchange from rank to rank (law 4). The rows that it sends
are grouped by the ranks of its host, then by hosts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Levels
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import merge_gradient
from gsplit.minibatch.route import Relay

__all__ = ["relay_gradients", "relay_requests", "relay_rows"]


def _other_hosts(levels: Levels) -> list[int]:
    return [host for host in range(levels.far.size) if host != levels.far.rank]


def _owners_by_relay(levels: Levels) -> list[int]:
    """All ranks, grouped by the rank of this host that relays their rows, which comes first in its group."""
    hosts = [levels.far.rank, *_other_hosts(levels)]
    return [host * levels.near.size + place for place in range(levels.near.size) for host in hosts]


def _sums(counts: Sequence[int], size: int) -> tuple[int, ...]:
    """The sums of runs of ``size`` numbers."""
    return tuple(sum(counts[first : first + size]) for first in range(0, len(counts), size))


def relay_requests(
    levels: Levels, counting: Call, sending: Call, ids: Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...], Relay]:
    """Request vertices from their owners, ``counts[p]`` of them from rank p. A collective.

    Returns the vertices that are requested from this rank and their counts: by every rank of its host, then by every
    host. Ids ascend with the ranks that own them.
    """
    near, far = levels.near, levels.far
    order = _owners_by_relay(levels)
    grouped = [counts[rank] for rank in order]
    table = torch.tensor(grouped).view(near.size, far.size)
    theirs = torch.empty_like(table)
    ones = (1,) * near.size
    near.all_to_all(counting, theirs, table, ones, ones).wait()  # all ranks: every layer of every step
    received = tuple(theirs.flatten().tolist())
    asked = ids.new_empty(sum(received))
    pieces = ids.split(counts)
    rows = torch.cat([pieces[rank] for rank in order])
    near.all_to_all(sending, asked, rows, _sums(received, far.size), _sums(grouped, far.size)).wait()
    parts = asked.split(received)  # of every rank of the host: for this rank itself, then for every other host
    firsts = range(0, len(parts), far.size)
    wanted = torch.cat([part for first in firsts for part in parts[first + 1 : first + far.size]])
    hosts = torch.tensor(_other_hosts(levels)).repeat(near.size).repeat_interleave(theirs[:, 1:].flatten())
    relayed, places = torch.unique(wanted, return_inverse=True)  # ascending, so by host
    host_of = torch.empty_like(relayed)
    host_of[places] = hosts
    relay = Relay(
        ids=relayed,
        rows=places,
        far_counts=tuple(torch.bincount(host_of, minlength=far.size).tolist()),
        near_counts=tuple(theirs[:, 1:].sum(1).tolist()),
    )
    far_counts = far.all_to_all_counts(counting, relay.far_counts)
    from_hosts = ids.new_empty(sum(far_counts))
    far.all_to_all(sending, from_hosts, relayed, far_counts, relay.far_counts).wait()
    requested = torch.cat([*(parts[first] for first in firsts), from_hosts])
    return requested, (*(received[first] for first in firsts), *far_counts), relay


def relay_rows(
    levels: Levels, call: Call, sent: Tensor, relay: Relay, recv_counts: tuple[int, ...], send_counts: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Send rows that ``relay_requests`` has requested, and return the received ones, a piece per rank. A collective.

    The pieces may be views of shared memory, valid until this rank's next exchange.
    """
    near, far = levels.near, levels.far
    own_counts = send_counts[: near.size]
    num_own = sum(own_counts)
    relayed = sent.new_empty(sum(relay.far_counts), *sent.shape[1:])
    far.all_to_all(call, relayed, sent[num_own:], relay.far_counts, send_counts[near.size :]).wait()
    counts = [own + passed for own, passed in zip(own_counts, relay.near_counts, strict=True)]
    buffer = near.send_buffer((sum(counts), *sent.shape[1:]), sent.dtype)
    own_rows = sent[:num_own].split(own_counts)
    passed_rows = relay.rows.split(relay.near_counts)
    for target, own, passed in zip(buffer.split(counts), own_rows, passed_rows, strict=True):
        target[: own.size(0)] = own
        torch.index_select(relayed, 0, passed, out=target[own.size(0) :])
    order = _owners_by_relay(levels)
    received = [recv_counts[rank] for rank in order]
    pieces = near.all_to_all_views(call, buffer, _sums(received, far.size), tuple(counts))
    by_rank: list[Tensor] = [sent] * len(order)
    for number, rank in enumerate(order):
        first = number // far.size * far.size
        begin = sum(received[first:number])
        by_rank[rank] = pieces[number // far.size][begin : begin + received[number]]
    return tuple(by_rank)


def relay_gradients(
    levels: Levels, call: Call, g: Tensor, relay: Relay, recv_counts: tuple[int, ...], send_counts: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients of received rows, and get those of the rows sent, a piece per count. A collective.

    The pieces may be views of shared memory, valid until this rank's next exchange.
    """
    near, far = levels.near, levels.far
    order = _owners_by_relay(levels)
    pieces = g.split(recv_counts)
    buffer = near.send_buffer(tuple(g.shape), g.dtype)
    torch.cat([pieces[rank] for rank in order], out=buffer)
    own_counts = send_counts[: near.size]
    counts = tuple(own + passed for own, passed in zip(own_counts, relay.near_counts, strict=True))
    sizes = _sums([recv_counts[rank] for rank in order], far.size)
    returned = near.all_to_all_views(call, buffer, counts, sizes)
    passed = [piece[own:] for piece, own in zip(returned, own_counts, strict=True)]
    sums = _add_up(passed, relay, g)
    from_hosts = far.all_to_all_views(call, sums, send_counts[near.size :], relay.far_counts)
    return (*(piece[:own] for piece, own in zip(returned, own_counts, strict=True)), *from_hosts)


def _add_up(passed: Sequence[Tensor], relay: Relay, like: Tensor) -> Tensor:
    """The sum of what the ranks of the host return for every relayed row, in the order of the ranks.

    Rows of 16 bits are added in float32, and rounded once.
    """
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    sums = like.new_zeros(sum(relay.far_counts), *like.shape[1:], dtype=dtype)
    if kernel_for("move rows", like.device, like.dtype) == "numba":
        merge_gradient(sums, sums[:0], relay.rows, tuple(passed), sums)
        return sums
    for rows, piece in zip(relay.rows.split(relay.near_counts), passed, strict=True):
        sums.index_add_(0, rows, piece.to(dtype))
    return sums.to(like.dtype)
