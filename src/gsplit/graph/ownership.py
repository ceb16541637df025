"""The owner of a vertex: a table of range boundaries, never a map of the vertices (law 6).

Rank r owns [boundaries[r], boundaries[r + 1]). A store partitioned into P parts serves any number of ranks up to P,
each owning a contiguous run of parts; a store with one part is cut into equal ranges.
"""

import functools
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain

__all__ = ["Ownership", "lightest_runs", "original_ids_of", "own_equally", "own_parts"]


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
        return len(self.boundaries) - 1

    @property
    def num_vertices(self) -> int:
        return self.boundaries[-1]

    def range_of(self, rank: int) -> tuple[int, int]:
        """First vertex of a rank and one past its last."""
        return self.boundaries[rank], self.boundaries[rank + 1]

    def owners(self, ids: Tensor) -> Tensor:
        """The rank of each vertex."""
        return torch.searchsorted(_inner_boundaries(self.boundaries, ids.dtype, ids.device), ids, right=True)


@functools.lru_cache(maxsize=64)
def _inner_boundaries(boundaries: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the second rank's range begins, the third's, and so on; put on a device once."""
    return torch.tensor(boundaries[1:-1], dtype=dtype, device=device)


def own_equally(num_vertices: int, num_ranks: int) -> Ownership:
    """Ranges of equal size.

    >>> own_equally(10, 3).boundaries
    (0, 3, 6, 10)
    """
    return Ownership(tuple(num_vertices * rank // num_ranks for rank in range(num_ranks + 1)))


def own_parts(part_boundaries: list[int], num_ranks: int, loads: list[int] | None = None) -> Ownership:
    """Contiguous runs of parts, the heaviest as light as can be; a rank is never without a part.

    ``loads`` is the work of every part; without it, its number of vertices. One part is cut into equal ranges.

    >>> own_parts([0, 4, 6, 9, 12], 2).boundaries, own_parts([0, 4, 6, 9, 12], 2, [1, 1, 1, 5]).boundaries
    ((0, 6, 12), (0, 9, 12))
    """
    num_parts = len(part_boundaries) - 1
    num_vertices = part_boundaries[-1]
    if num_parts == 1:
        return own_equally(num_vertices, num_ranks)
    if num_ranks > num_parts:
        fix = f"run at most {num_parts} ranks, or partition into more parts"
        raise InputError(explain("ranks", f"at most one per part, {num_parts}", num_ranks, fix))
    starts = lightest_runs(loads if loads is not None else np.diff(part_boundaries).tolist(), num_ranks)
    return Ownership((*(part_boundaries[start] for start in starts), num_vertices))


def lightest_runs(loads: list[int], num_runs: int) -> list[int]:
    """Cut a row of loads into runs so that the heaviest is as light as can be; the first place of every run.

    >>> lightest_runs([3, 1, 1, 3, 2], 3)
    [0, 2, 4]
    """
    ends = list(accumulate(loads))
    light = max(loads)
    heavy = ends[-1]
    while light < heavy:  # the least that the heaviest run can be, by halving
        middle = (light + heavy) // 2
        if _count_runs(ends, middle) <= num_runs:
            heavy = middle
        else:
            light = middle + 1
    starts = [0]
    for run in range(1, num_runs):
        done = ends[starts[-1] - 1] if starts[-1] else 0
        last = len(loads) - (num_runs - run)  # one place is left for each of the others
        starts.append(max(starts[-1] + 1, min(bisect_right(ends, done + light), last)))
    return starts


def _count_runs(ends: list[int], heaviest: int) -> int:
    """How many runs of at most this load it takes."""
    runs, done = 0, 0
    while done < ends[-1]:
        done = ends[bisect_right(ends, done + heaviest) - 1]
        runs += 1
    return runs


def original_ids_of(ids: Tensor, original_ids: npt.NDArray[np.int64], first_vertex: int) -> Tensor:
    """Original ids of some vertices, where those from ``first_vertex`` on are listed; an empty list changes nothing.

    >>> original_ids_of(torch.tensor([6, 5]), np.array([40, 50]), first_vertex=5).tolist()
    [50, 40]
    """
    if not original_ids.size:
        return ids
    return torch.from_numpy(original_ids[ids.cpu().numpy() - first_vertex]).to(ids.device)
