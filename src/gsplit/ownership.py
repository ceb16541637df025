"""Who owns a vertex: a table of range boundaries, never a map of the vertices (law 6).

Rank r owns [boundaries[r], boundaries[r + 1]). A store partitioned into P parts serves any number of ranks up to P,
each owning a contiguous run of parts; a store with one part is cut into equal ranges.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gsplit.errors import InputError, explain

__all__ = ["Ownership", "own_equally", "own_parts"]


@dataclass(frozen=True)
class Ownership:
    """Boundaries of the ranks' ranges, ascending from 0 to the number of vertices; ranges may be empty.

    >>> Ownership((0, 5, 5, 10)).owners(torch.tensor([0, 4, 5, 9])).tolist()
    [0, 0, 2, 2]
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        cuts = self.boundaries
        if len(cuts) < 2 or cuts[0] != 0 or any(a > b for a, b in pairwise(cuts)):
            fix = "give one more boundary than ranks"
            raise InputError(explain("boundaries", "numbers ascending from 0", cuts, fix))

    @property
    def num_ranks(self) -> int:
        """Ranks that share the vertices."""
        return len(self.boundaries) - 1

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole graph."""
        return self.boundaries[-1]

    def range_of(self, rank: int) -> tuple[int, int]:
        """First vertex of a rank and one past its last."""
        return self.boundaries[rank], self.boundaries[rank + 1]

    def owners(self, ids: Tensor) -> Tensor:
        """The rank of each vertex."""
        inner = torch.tensor(self.boundaries[1:-1], dtype=ids.dtype, device=ids.device)
        return torch.searchsorted(inner, ids, right=True)


def own_equally(num_vertices: int, num_ranks: int) -> Ownership:
    """Ranges of equal size.

    >>> own_equally(10, 3).boundaries
    (0, 3, 6, 10)
    """
    return Ownership(tuple(num_vertices * rank // num_ranks for rank in range(num_ranks + 1)))


def own_parts(part_boundaries: list[int], num_ranks: int) -> Ownership:
    """Contiguous runs of parts, as even in vertices as the parts allow; one part is cut into equal ranges.

    >>> own_parts([0, 4, 6, 9, 12], 2).boundaries
    (0, 6, 12)
    """
    num_parts, num_vertices = len(part_boundaries) - 1, part_boundaries[-1]
    if num_parts == 1:
        return own_equally(num_vertices, num_ranks)
    if num_ranks > num_parts:
        fix = f"run at most {num_parts} ranks, or partition into more parts"
        raise InputError(explain("ranks", f"at most one per part, {num_parts}", num_ranks, fix))
    cuts, ideal = np.asarray(part_boundaries), own_equally(num_vertices, num_ranks).boundaries
    chosen = [0]
    for rank in range(1, num_ranks):
        first, last = chosen[-1] + 1, num_parts - (num_ranks - rank)  # every rank gets a part
        candidates = np.arange(first, last + 1)
        chosen.append(int(candidates[np.abs(cuts[candidates] - ideal[rank]).argmin()]))
    return Ownership(tuple(int(cuts[part]) for part in [*chosen, num_parts]))
