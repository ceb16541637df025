"""Device kernels of neighbour sampling: the same draws as ``kernels_numba``, bit for bit, in plain torch operations.

Picks are found for all rows at once, slot after slot; rows are found by sorting instead of by a table. Both keep the
order in which a host kernel would find each vertex, so blocks are equal in every index.
"""

import torch
from torch import Tensor

from gsplit.keys.kernels_torch import bounded, mix, neg_log2

__all__ = [
    "count_layer",
    "draw_from_runs",
    "draw_places",
    "draw_replace",
    "draw_smallest",
    "find_ends",
    "first_seen",
    "place_foreign",
]

_SIGN = -(1 << 63)


def count_layer(indptr: Tensor, rows: Tensor, fanout: int) -> Tensor:
    """Offsets of the in-edges each row will draw; fanout -1 takes them all."""
    degrees = indptr[rows + 1] - indptr[rows]
    return _offsets(degrees if fanout < 0 else degrees.clamp(max=fanout))


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def draw_places(indptr: Tensor, rows: Tensor, original_ids: Tensor, key: int, out_indptr: Tensor) -> Tensor:
    """Where in the graph the drawn in-edges stand, destination after destination, slot after slot."""
    starts = indptr[rows]
    return draw_from_runs(starts, indptr[rows + 1] - starts, original_ids, key, out_indptr)


def find_ends(values: Tensor, starts: Tensor, stops: Tensor, limits: Tensor | int, max_length: int) -> Tensor:
    """One past the last value of each run that is at most its limit, by bisection of all runs at once.

    The values ``starts[i] .. stops[i] - 1`` of run i ascend; no run is longer than ``max_length``.

    >>> find_ends(torch.tensor([1, 3, 5, 2]), torch.tensor([0, 3]), torch.tensor([3, 4]), 3, 3).tolist()
    [2, 4]
    """
    last = max(0, values.numel() - 1)
    for _ in range(max_length.bit_length()):
        middle = (starts + stops) >> 1
        inside = starts < stops
        below = inside & (values[middle.clamp(max=last)] <= limits)
        starts = torch.where(below, middle + 1, starts)
        stops = torch.where(inside & ~below, middle, stops)
    return starts


def draw_from_runs(starts: Tensor, degrees: Tensor, original_ids: Tensor, key: int, out_indptr: Tensor) -> Tensor:
    """``draw_places`` for runs of edges: row i draws from the ``degrees[i]`` edges that begin at ``starts[i]``."""
    counts = out_indptr.diff()
    edge_rows = torch.repeat_interleave(torch.arange(starts.numel(), device=starts.device), counts)
    positions = torch.arange(edge_rows.numel(), device=starts.device) - out_indptr[edge_rows]
    drawn = torch.nonzero(counts < degrees).squeeze(1)  # device sync
    if drawn.numel():  # the others take every neighbour, in order
        fanout = int(counts[drawn[0]])  # device sync; the same for all of them
        picks = _floyd(mix(key, original_ids[drawn]), degrees[drawn], fanout)
        slots = out_indptr[drawn].unsqueeze(1) + torch.arange(fanout, device=starts.device)
        positions[slots.reshape(-1)] = picks.reshape(-1)
    return starts[edge_rows] + positions


def _floyd(keys: Tensor, degrees: Tensor, count: int) -> Tensor:
    """``count`` distinct positions below each degree."""
    picks = torch.empty(keys.numel(), count, dtype=torch.int64, device=keys.device)
    for slot in range(count):
        last = degrees - count + slot
        pick = bounded(mix(keys, torch.full_like(keys, slot)), last + 1)
        taken = (picks[:, :slot] == pick.unsqueeze(1)).any(dim=1)
        picks[:, slot] = torch.where(taken, last, pick)
    return picks


def draw_replace(indptr: Tensor, rows: Tensor, original_ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
    """Offsets and places of ``fanout`` in-edges of every row that has any, with replacement."""
    starts = indptr[rows]
    degrees = indptr[rows + 1] - starts
    slots = torch.arange(fanout, device=rows.device)
    picks = bounded(mix(mix(key, original_ids).unsqueeze(1), slots), degrees.unsqueeze(1))
    filled = degrees > 0
    return _offsets(filled * fanout), (starts.unsqueeze(1) + picks)[filled].reshape(-1)  # device sync


def draw_smallest(
    indptr: Tensor,
    rows: Tensor,
    original_ids: Tensor,
    key: int,
    fanout: int,
    source_ids: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Offsets and places of the in-edges of every row that have the smallest numbers, in order of position.

    Numbers belong to sources if ``source_ids`` are given (LABOR), otherwise to positions. Sorting is stable: of equal
    numbers, those at the earlier positions come first. Memory: some words for every in-edge of the rows.
    """
    starts = indptr[rows]
    edge_rows = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), indptr[rows + 1] - starts)
    places = starts[edge_rows] + torch.arange(edge_rows.numel(), device=rows.device)
    places -= _offsets(indptr[rows + 1] - starts)[edge_rows]
    if weights is not None:
        positive = weights[places] > 0
        edge_rows = edge_rows[positive]
        places = places[positive]
    candidates = torch.bincount(edge_rows, minlength=rows.numel())
    if fanout < 0:
        return _offsets(candidates), places
    if source_ids is not None:
        words = mix(key, source_ids[places])
    else:
        words = mix(mix(key, original_ids)[edge_rows], places - starts[edge_rows])
    numbers = words ^ _SIGN if weights is None else neg_log2(words).double() / weights[places]
    order = torch.argsort(numbers, stable=True)
    order = order[torch.argsort(edge_rows[order], stable=True)]
    in_order = edge_rows[order]
    rank = torch.arange(order.numel(), device=rows.device) - _offsets(candidates)[in_order]
    kept = order[rank < fanout].sort().values
    return _offsets(candidates.clamp(max=fanout)), places[kept]


def first_seen(ids: Tensor, num_known: int) -> tuple[Tensor, Tensor]:
    """Distinct ids in the order of their first appearance, and each id's place among them.

    The first ``num_known`` ids are distinct already and keep their places.
    """
    distinct, place = torch.unique(ids, return_inverse=True)
    if distinct.numel() == num_known:
        order_of_known = torch.empty_like(distinct)
        order_of_known[place[:num_known]] = torch.arange(num_known, device=ids.device)
        return ids[:num_known], order_of_known[place]
    first = torch.full_like(distinct, ids.numel())
    first.scatter_reduce_(0, place, torch.arange(ids.numel(), device=ids.device), "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], rank[place]


def place_foreign(sources: Tensor, rows: Tensor) -> Tensor:
    """``sources`` with each ``-1 - slot`` replaced by ``rows[slot]``."""
    if rows.numel() == 0:
        return sources
    slots = (-1 - sources).clamp(min=0)
    return torch.where(sources < 0, rows[slots], sources)
