"""Exclusion of edges from sampled layers: the edges that a step predicts must not be in its mini-batch.

Edges are removed after the draw and before rows are numbered, in every layer. A vertex may then have fewer edges than
the fanout, and vertices that only these edges reach are not loaded. Edges are excluded by vertex, not by row: under
data parallelism an endpoint of another rank's pair may be a source deep in a micro-batch. Excluding an edge that the
graph does not have has no effect. The degrees of GCN's normalisation are those of the whole graph, excluded edges
included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel

__all__ = ["ExcludedEdges", "drop_excluded", "keep_included"]


@dataclass(frozen=True, slots=True)
class ExcludedEdges:
    """The edges ``src[i] -> dst[i]`` by internal id, ordered by destination, then by source."""

    src: Tensor
    dst: Tensor

    @classmethod
    def of(cls, src: Tensor, dst: Tensor, *, reverse: bool) -> "ExcludedEdges":
        """Exclude some edges, with ``reverse`` also those in the other direction.

        >>> ExcludedEdges.of(torch.tensor([5]), torch.tensor([2]), reverse=True)
        ExcludedEdges(src=tensor([5, 2]), dst=tensor([2, 5]))
        """
        if reverse:
            src, dst = torch.cat([src, dst]), torch.cat([dst, src])
        by_source = torch.argsort(src)
        order = by_source[torch.argsort(dst[by_source], stable=True)]
        return cls(src[order], dst[order])


@kernel
def _first_at_least(values: Ids, wanted: int, low: int, high: int) -> int:
    """The first place from ``low`` to ``high`` whose value is not below ``wanted``; ``high`` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def drop_excluded(frontier: Ids, indptr: Ids, sources: Ids, places: Ids, src: Ids, dst: Ids) -> None:
    """Remove the edges ``src -> dst``, which are ordered by ``dst``, then by ``src``, from a drawn layer, in place.

    The edges that are kept are moved to the front, and ``indptr`` becomes theirs. ``sources`` and ``places`` may be the
    same array.
    """
    count = 0
    begin = indptr[0]
    for i in range(frontier.size):
        end = indptr[i + 1]
        first = _first_at_least(dst, frontier[i], 0, dst.size)
        stop = _first_at_least(dst, frontier[i] + 1, first, dst.size)
        for e in range(begin, end):
            x = _first_at_least(src, sources[e], first, stop)
            if x == stop or src[x] != sources[e]:
                source = sources[e]
                place = places[e]
                sources[count] = source
                places[count] = place
                count += 1
        begin = end
        indptr[i + 1] = count


def keep_included(ids: Tensor, indptr: Tensor, sources: Tensor, excluded: ExcludedEdges) -> tuple[Tensor, Tensor]:
    """The same with torch operations: the new offsets, and the positions of the edges that are kept.

    ``sources`` are vertices. Ids are replaced by their places among the excluded ones, so that a pair fits one word.
    """
    rows = torch.repeat_interleave(torch.arange(ids.numel(), device=ids.device), indptr.diff())
    if excluded.dst.numel() == 0:
        return indptr, torch.arange(rows.numel(), device=ids.device)
    dst_ids, dst_of = torch.unique(excluded.dst, return_inverse=True)
    src_ids, src_of = torch.unique(excluded.src, return_inverse=True)
    dst_place = _places(ids, dst_ids)[rows]
    src_place = _places(sources, src_ids)
    both = (dst_place >= 0) & (src_place >= 0)
    is_listed = torch.isin(dst_place * src_ids.numel() + src_place, dst_of * src_ids.numel() + src_of)
    kept = torch.nonzero(~(both & is_listed)).view(-1)  # device sync
    counts = torch.bincount(rows[kept], minlength=ids.numel())
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), kept


def _places(ids: Tensor, listed: Tensor) -> Tensor:
    """The place of every id among some ascending ones; -1 if it is not listed."""
    places = torch.searchsorted(listed, ids).clamp(max=listed.numel() - 1)
    return torch.where(listed[places] == ids, places, -1)
