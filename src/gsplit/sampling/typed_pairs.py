"""Pairs of a heterogeneous graph: all of one edge type, such as ("user", "rates", "item").

Pairs are listed by ids in the types of their ends, and become fused original ids here, so that a step of pairs is that
of a graph without types. Negatives are drawn from the vertices of the end's type. Excluded edges are those of the edge
type of the pairs, and of its reverse edge types in the other direction: by (relation, source, destination). Samplers
that exclude edges name a source ``relation * num_vertices + source``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.pairs import ListedPairs

__all__ = ["PairType", "pair_type"]


@dataclass(frozen=True)
class PairType:
    """The edge type of pairs. ``sources``, ``destinations``: the fused original ids of the vertices of its ends.

    ``reverse``: the numbers of the edge types that have the same edges in the other direction.
    """

    edge_type: EdgeType
    number: int
    sources: range
    destinations: range
    reverse: tuple[int, ...]
    num_vertices: int

    def fuse(self, pairs: ListedPairs) -> ListedPairs:
        """The same pairs by fused original ids, from ids in the types."""

        def read(positions: Ids) -> tuple[Ids, Ids]:
            src, dst = pairs.read(positions)
            for ids, end, name in ((src, self.sources, 0), (dst, self.destinations, 2)):
                if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(end):
                    got = f"{ids.min()}..{ids.max()}"
                    expected = f"ids in 0..{len(end) - 1} of {self.edge_type[name]}"
                    raise InputError(explain("pairs", expected, got, "give ids in the types"))
            return src + self.sources.start, dst + self.destinations.start

        return replace(pairs, read=read)

    def exclude(self, src: Tensor, dst: Tensor, *, reverse: bool) -> ExcludedEdges:
        """The edges of some pairs, by internal ids, and with ``reverse`` those of the reverse edge types.

        >>> types = GraphTypes(("u", "i"), (("u", "r", "i"), ("i", "rev_r", "u")), (0, 3, 5), (0, 3, 5))
        >>> pairs = pair_type(types, ("u", "r", "i"), None)
        >>> pairs.exclude(torch.tensor([1]), torch.tensor([4]), reverse=True)
        ExcludedEdges(src=tensor([9, 1]), dst=tensor([1, 4]))
        """
        sources = [src + self.number * self.num_vertices]
        destinations = [dst]
        for number in self.reverse if reverse else ():
            sources.append(dst + number * self.num_vertices)
            destinations.append(src)
        return ExcludedEdges.of(torch.cat(sources), torch.cat(destinations), reverse=False)


def pair_type(types: GraphTypes, edge_type: Any, reverse: Mapping[EdgeType, EdgeType] | None) -> PairType:
    """The edge type of pairs. ``reverse``: {edge type: its reverse}; None for those named as ``ToUndirected`` does."""
    if edge_type not in types.edge_types:
        expected = f"(edge type, pairs), where the type is one of {list(types.edge_types)}"
        fix = 'write (("user", "rates", "item"), pairs)'
        raise InputError(explain("pairs", expected, edge_type, fix))
    src, name, dst = edge_type
    back = [found for found in types.edge_types if (found[0], found[2]) == (dst, src)]
    if reverse is None:
        names = (f"rev_{name}", name.removeprefix("rev_"))
        known = [found for found in back if found[1] in names or found == edge_type]
        if back and not known:
            fix = (
                f"give reverse_edge_types={{{edge_type}: EDGE TYPE}}, or {{}} if none of them is; "
                f"or name it rev_{name} when you import the graph"
            )
            raise InputError(explain("reverse_edge_types", f"the reverse of {edge_type}, if it is stored", back, fix))
    elif reverse and edge_type not in reverse:
        fix = f"write {{{edge_type}: its reverse}}, or {{}} if it has none"
        raise InputError(explain("reverse_edge_types", f"the reverse of {edge_type}", dict(reverse), fix))
    else:
        known = [found for found in [reverse.get(edge_type)] if found is not None]
        if any(found not in back for found in known):
            fix = "name one of these"
            raise InputError(explain("reverse_edge_types", f"an edge type from {dst} to {src}: {back}", known[0], fix))
    ends = [range(types.offsets[number], types.offsets[number + 1]) for number in map(types.number, (src, dst))]
    return PairType(
        edge_type=edge_type,
        number=types.edge_types.index(edge_type),
        sources=ends[0],
        destinations=ends[1],
        reverse=tuple(types.edge_types.index(found) for found in known),
        num_vertices=types.offsets[-1],
    )
