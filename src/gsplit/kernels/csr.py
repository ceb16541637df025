"""Edges grouped by destination as attention layers take them: a CSR matrix, with PyG's self-loops if wanted.

``src_rows[indptr[i] : indptr[i + 1]]`` are the sources of destination i. Destinations are the first rows of the
sources, so row i of both is one vertex and an edge (i, i) is a self-loop. With self-loops as PyG's ``GATConv`` makes
them, those that were sampled are left out, and every destination gets one, which is the last of its edges.

``places`` identifies an edge: its number among ALL sampled edges of its destination, or ``LOOP`` for an added
self-loop. Dropout goes by it.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.kernels.sums_numba import group_edges

__all__ = [
    "LOOP",
    "CsrEdges",
    "EdgesBySource",
    "count_loops",
    "csr_matrix",
    "destination_rows",
    "group_by_source",
    "group_rows",
    "make_csr_edges",
]

LOOP = 1 << 62


@dataclass(frozen=True, slots=True)
class CsrEdges:
    """See the module. indptr [num_dst + 1], src_rows [num_edges] and places [num_edges] are int64."""

    indptr: Tensor
    src_rows: Tensor
    places: Tensor
    num_src: int

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.src_rows.numel()


def destination_rows(indptr: Tensor, num_edges: int) -> Tensor:
    """The destination of every edge. Waits for no device: the number of edges is known."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)


def group_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Where each row occurs in ``rows``: ``places[offsets[i] : offsets[i + 1]]``, ascending. Waits for no device.

    ``rows``: int64, values below ``num_rows``. Returns ``offsets`` [num_rows + 1] and ``places`` [rows.numel()], int64.
    """
    ordered, places = torch.sort(rows, stable=True)
    return torch.searchsorted(ordered, torch.arange(num_rows + 1, device=rows.device)), places


@dataclass(frozen=True, slots=True)
class EdgesBySource:
    """Edges grouped by source, in the order of their destinations: what the gradients of sums over edges are added by.

    ``offsets`` [S + 1]; ``places`` [E]: the position of every edge in the block; ``dst_rows`` [E]: its destination.
    """

    offsets: Tensor
    places: Tensor
    dst_rows: Tensor


def group_by_source(indptr: Tensor, src_rows: Tensor, num_src: int) -> EdgesBySource:
    """The transpose of a block. Waits for no device."""
    if indptr.device.type == "cpu":
        grouped = group_edges(indptr.numpy(), src_rows.numpy(), num_src)
        return EdgesBySource(*(torch.from_numpy(array) for array in grouped))
    offsets, places = group_rows(src_rows, num_src)
    return EdgesBySource(offsets, places, destination_rows(indptr, src_rows.numel())[places])


def csr_matrix(indptr: Tensor, rows: Tensor, values: Tensor, *, num_columns: int) -> Tensor:
    """torch's sparse matrix of edges, on any device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once per process that CSR is in beta
        size = (indptr.numel() - 1, num_columns)
        return torch.sparse_csr_tensor(indptr, rows, values, size, check_invariants=False)


@kernel
def _count_loops(indptr: Ids, src_rows: Ids) -> int:
    count = 0
    for i in range(indptr.size - 1):
        for e in range(indptr[i], indptr[i + 1]):
            count += src_rows[e] == i
    return count


def count_loops(indptr: Tensor, src_rows: Tensor) -> Tensor:
    """How many edges are self-loops, a number where the edges are.

    >>> int(count_loops(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])))
    2
    """
    if src_rows.device.type == "cpu":
        return torch.tensor(_count_loops(indptr.numpy(), src_rows.numpy()))
    return (src_rows == destination_rows(indptr, src_rows.numel())).sum()


@kernel
def _count(indptr: Ids, src_rows: Ids, num_src: int, add_self_loops: bool) -> Ids:
    """Where each destination's edges begin; empty if a row lies out of bounds."""
    found = np.zeros(indptr.size, np.int64)
    for i in range(indptr.size - 1):
        count = 1 if add_self_loops else 0
        for e in range(indptr[i], indptr[i + 1]):
            if not 0 <= src_rows[e] < num_src:
                return found[:0]
            if not add_self_loops or src_rows[e] != i:
                count += 1
        found[i + 1] = found[i] + count
    return found


@kernel
def _fill(indptr: Ids, src_rows: Ids, add_self_loops: bool, new_src_rows: Ids, places: Ids) -> None:
    place = 0
    for i in range(indptr.size - 1):
        for e in range(indptr[i], indptr[i + 1]):
            if not add_self_loops or src_rows[e] != i:
                new_src_rows[place], places[place] = src_rows[e], e - indptr[i]
                place += 1
        if add_self_loops:
            new_src_rows[place], places[place] = i, LOOP
            place += 1


def make_csr_edges(indptr: Tensor, src_rows: Tensor, num_src: int, *, add_self_loops: bool) -> CsrEdges:
    """The edges of a block on the host, checked once, so that kernels need not."""
    starts = indptr.numpy()
    sources = src_rows.numpy()
    ascending = starts.size > 0 and starts[0] == 0 and starts[-1] == sources.size and bool((np.diff(starts) >= 0).all())
    if not ascending or num_src < starts.size - 1:
        raise ValueError(f"edges: expected a CSR matrix of at most {num_src} rows (got {starts.size - 1})")
    counted = _count(starts, sources, num_src, add_self_loops)
    if not counted.size:
        raise ValueError(f"edges: expected source rows in [0, {num_src}) (got {sources.min()}..{sources.max()})")
    new_src_rows = np.empty(counted[-1], np.int64)
    places = np.empty(counted[-1], np.int64)
    _fill(starts, sources, add_self_loops, new_src_rows, places)
    made = [torch.from_numpy(array) for array in (counted, new_src_rows, places)]
    return CsrEdges(made[0], made[1], made[2], num_src)
