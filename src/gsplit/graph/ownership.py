"""The owners of vertices: a table of range boundaries, not a map of all vertices (law 6).

Rank r owns the vertices ``boundaries[r] .. boundaries[r + 1] - 1``. A store with P parts can be used by up to P ranks,
each of which owns consecutive parts. A store with one part is divided into equal ranges.
"""

import functools
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain

if TYPE_CHECKING:  # the command line checks the number of ranks before it imports torch
    import torch
    from torch import Tensor

__all__ = ["Ownership", "lightest_runs", "original_ids_of", "own_equally", "own_parts"]


@dataclass(frozen=True)
class Ownership:
    """The boundaries of the ranks' ranges, ascending from 0 to the number of vertices. Ranges may be empty.

    Of three ranks, rank 0 owns vertices 0..4, rank 1 owns none and rank 2 owns 5..9:

    >>> import torch
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
        """The number of ranks that share the vertices."""
        return len(self.boundaries) - 1

    @property
    def num_vertices(self) -> int:
        """The number of vertices of the whole graph."""
        return self.boundaries[-1]

    def range_of(self, rank: int) -> tuple[int, int]:
        """The first vertex of a rank, and one past its last."""
        return self.boundaries[rank], self.boundaries[rank + 1]

    def owners(self, ids: "Tensor") -> "Tensor":
        """The rank that owns each vertex."""
        import torch

        return torch.searchsorted(_inner_boundaries(self.boundaries, ids.dtype, ids.device), ids, right=True)


@functools.lru_cache(maxsize=64)
def _inner_boundaries(boundaries: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> "Tensor":
    """The first vertex of every rank but the first, on a device. Cached, so that it is copied once."""
    import torch

    return torch.tensor(boundaries[1:-1], dtype=dtype, device=device)


def own_equally(num_vertices: int, num_ranks: int) -> Ownership:
    """Ranges of equal size.

    >>> own_equally(10, 3).boundaries
    (0, 3, 6, 10)
    """
    return Ownership(tuple(num_vertices * rank // num_ranks for rank in range(num_ranks + 1)))


def own_parts(part_boundaries: list[int], num_ranks: int, loads: list[int] | None = None) -> Ownership:
    """Give each rank consecutive parts, at least one, so that the largest load of a rank is as small as possible.

    ``loads``: the work of every part; by default its number of vertices. A single part is divided into equal ranges.

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
    if loads is None:
        loads = np.diff(part_boundaries).tolist()
    starts = lightest_runs(loads, num_ranks)
    return Ownership((*(part_boundaries[start] for start in starts), num_vertices))


def lightest_runs(loads: list[int], num_runs: int) -> list[int]:
    """Divide a list of loads into runs so that the largest sum is as small as possible; the start of every run.

    >>> lightest_runs([3, 1, 1, 3, 2], 3)
    [0, 2, 4]
    """
    ends = list(accumulate(loads))
    low = max(loads)
    high = ends[-1]
    while low < high:  # bisection of the smallest possible largest sum
        middle = (low + high) // 2
        if _count_runs(ends, middle) <= num_runs:
            high = middle
        else:
            low = middle + 1
    starts = [0]
    for run in range(1, num_runs):
        done = ends[starts[-1] - 1] if starts[-1] else 0
        last = len(loads) - (num_runs - run)  # leaves one place for each of the others
        starts.append(max(starts[-1] + 1, min(bisect_right(ends, done + low), last)))
    return starts


def _count_runs(ends: list[int], heaviest: int) -> int:
    """The number of runs that are needed if no sum may be larger than ``heaviest``."""
    runs = 0
    done = 0
    while done < ends[-1]:
        done = ends[bisect_right(ends, done + heaviest) - 1]
        runs += 1
    return runs


def original_ids_of(ids: "Tensor", original_ids: npt.NDArray[np.int64], first_vertex: int) -> "Tensor":
    """The original ids of some vertices. ``original_ids[i]`` is that of ``first_vertex + i``; empty: ids are original.

    >>> import torch
    >>> original_ids_of(torch.tensor([6, 5]), np.array([40, 50]), first_vertex=5).tolist()
    [50, 40]
    """
    if not original_ids.size:
        return ids
    import torch

    return torch.from_numpy(original_ids[ids.cpu().numpy() - first_vertex]).to(ids.device)
