"""Tables of what split parallelism saves in loading, from counts: the paper's Table 1, cache hits, foreign copies.

- Redundancy: edges computed and rows read per epoch, of one process (``mini``), data parallelism and split parallelism.
- Hits: of every rank's reads, how many find their row among the first so many per cent of its vertices in some order,
  beside what ``hotness`` predicts of them. The mini-batches are of another seed than the presampled ones.
- Copies: rows that cross between ranks at layer 0 against copies of the hottest foreign rows on every rank.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.distributed.comm import SoloComm
from gsplit.features.copies import choose_prefixes
from gsplit.graph import Graph
from gsplit.keys.kernels_numba import mix_array
from gsplit.ownership import Ownership
from gsplit.store.reader import Store
from gsplit_bench.loading_counts import LoadingCounts

__all__ = ["BUDGETS", "COPY_BUDGETS", "Orders", "copies_table", "hits_table", "received_with_copies", "redundancy_row"]

BUDGETS = (0.05, 0.10, 0.25, 0.50)
COPY_BUDGETS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.25)
_PIECE = 1 << 24
_RANDOM = 12

Ids = npt.NDArray[np.int64]


def redundancy_row(mini: LoadingCounts, data: LoadingCounts, split: LoadingCounts) -> dict[str, Any]:
    """One line of the paper's Table 1."""
    return {
        "num_batches": mini.num_batches,
        "edges": {"mini": mini.edges, "data": data.edges, "split": split.edges},
        "rows": {"mini": mini.rows, "data": data.rows, "split": split.rows},
        "edges_data_to_mini": data.edges / mini.edges,
        "edges_split_to_mini": split.edges / mini.edges,
        "rows_data_to_mini": data.rows / mini.rows,
        "rows_split_to_mini": split.rows / mini.rows,
        "rows_received": split.rows_received,
    }


@dataclass(frozen=True)
class Orders:
    """Ways to fill a cache. ``keys[name]``: a number for every vertex, those with the smallest are cached first."""

    keys: dict[str, Ids]

    @classmethod
    def of_store(cls, store: Store) -> "Orders":
        """By hotness, by degree, at random, and by original id."""
        hotness = np.asarray(store.stored_array("hotness"))
        original = np.asarray(store.original_ids())
        random = (mix_array(_RANDOM, original) >> np.uint64(1)).astype(np.int64)
        return cls({"hot": -hotness, "degree": -_out_degrees(store.graph), "random": random, "id": original})

    def cached(self, name: str, first: int, stop: int, rows: int) -> Ids:
        """The vertices of a range that are cached: the first so many of an order."""
        return first + np.argsort(self.keys[name][first:stop], kind="stable")[:rows]


def _out_degrees(graph: Graph) -> Ids:
    """How often each vertex is a source."""
    degrees = np.zeros(graph.num_vertices, np.int64)
    for start in range(0, graph.indices.size, _PIECE):
        degrees += np.bincount(graph.indices[start : start + _PIECE], minlength=graph.num_vertices)
    return degrees


def hits_table(orders: Orders, hotness: Ids, ownership: Ownership, split: LoadingCounts) -> list[dict[str, Any]]:
    """Measured and predicted share of reads that hit, per rank and over all, by order and budget."""
    rows: list[dict[str, Any]] = []
    ranges = [ownership.range_of(rank) for rank in range(ownership.num_ranks)]
    for name in orders.keys:
        for budget in BUDGETS:
            cached = [orders.cached(name, low, high, int(budget * (high - low))) for low, high in ranges]
            measured = [_share(split.loaded, ids, *span) for ids, span in zip(cached, ranges, strict=True)]
            predicted = [_share(hotness, ids, *span) for ids, span in zip(cached, ranges, strict=True)]
            everything = np.concatenate(cached)
            rows.append(
                {
                    "ranks": ownership.num_ranks,
                    "order": name,
                    "budget": budget,
                    "measured": _share(split.loaded, everything, 0, hotness.size),
                    "predicted": _share(hotness, everything, 0, hotness.size),
                    "measured_by_rank": measured,
                    "predicted_by_rank": predicted,
                    "most_off": max(abs(m - p) for m, p in zip(measured, predicted, strict=True)),
                }
            )
    return rows


def _share(counts: Ids, ids: Ids, low: int, high: int) -> float:
    return float(counts[ids].sum() / max(1, counts[low:high].sum()))


def received_with_copies(
    hotness: Ids, part_boundaries: list[int], ownership: Ownership, split: LoadingCounts, capacity: int
) -> tuple[int, int]:
    """Rows that a rank holds copies of, at most, and rows that still cross, if so many may be copied."""
    prefixes = choose_prefixes(hotness, 0, part_boundaries, ownership, capacity, SoloComm())
    held = max(prefixes.num_held(ownership, rank) for rank in range(ownership.num_ranks))
    copied = [slice(first, first + n) for first, n in zip(prefixes.boundaries, prefixes.lengths, strict=False)]
    return held, split.rows_received - sum(int(split.received[rows].sum()) for rows in copied)


def copies_table(
    hotness: Ids, part_boundaries: list[int], ownership: Ownership, split: LoadingCounts
) -> list[dict[str, Any]]:
    """Rows exchanged at layer 0, against rows copied to every rank, as a share of the graph's."""
    table: list[dict[str, Any]] = []
    for budget in COPY_BUDGETS:
        capacity = int(budget * hotness.size)
        held, received = received_with_copies(hotness, part_boundaries, ownership, split, capacity)
        table.append(
            {
                "ranks": ownership.num_ranks,
                "budget": budget,
                "rows_per_rank": held,
                "rows_received": received,
                "of_no_copies": received / max(1, split.rows_received),
            }
        )
    return table
