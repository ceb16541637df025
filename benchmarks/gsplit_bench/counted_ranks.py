"""Ranks that this machine does not have: what each would do in a step, counted in one process for 1 to 64 of them.

The counting is the planner's (``planner.counts``), by the sampler and the split of training. One store serves every
number of ranks that it has parts for.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gsplit.features.cache import stored_row_bytes
from gsplit.graph.ownership import own_parts
from gsplit.partitioning.presample import Workload
from gsplit.partitioning.settings import C_E, C_V
from gsplit.planner.counts import RankCounts, StrategyCounts, count_strategies
from gsplit.progress import Progress, silent
from gsplit.store.reader import Store

__all__ = ["RanksCount", "count_ranks"]


@dataclass(frozen=True)
class RanksCount:
    """One strategy on some ranks, per step. ``input_rows``: what a rank's bottom layer reads, own and received.

    Bytes are those of loading and forward, hidden rows in float32. ``imbalance``: largest over mean work of a rank,
    in vertices and edges weighed as partitioning does by default.
    """

    graph: str
    strategy: str
    ranks: int
    batch_size: int
    fanout: list[int]
    hidden: int
    steps: int
    edges: float
    edges_per_rank: list[float]
    input_rows_per_rank: list[float]
    rows_loaded_per_rank: list[float]
    rows_sent_per_rank: list[float]
    bytes_sent_per_rank: list[float]
    imbalance: float

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the document."""
        return asdict(self)


def count_ranks(
    store: Store,
    workload: Workload,
    ranks: int,
    strategies: Sequence[str],
    *,
    hidden: int,
    steps: int,
    progress: Progress = silent,
) -> list[RanksCount]:
    """Count every strategy on some ranks, over the first ``steps`` mini-batches of an epoch."""
    ownership = own_parts(store.part_boundaries, ranks, store.part_loads)
    steps = min(steps, workload.steps_per_epoch)
    found = count_strategies(workload, ownership, strategies, steps=steps, progress=progress)
    return [_sum_up(store, workload, counts, hidden) for counts in found]


def _sum_up(store: Store, workload: Workload, counts: StrategyCounts, hidden: int) -> RanksCount:
    work = [_work(rank) for rank in counts.ranks]
    row_bytes = stored_row_bytes(store, ["x"]) if "features/x" in store.names else 0
    return RanksCount(
        graph=store.path.stem,
        strategy=counts.spec.name,
        ranks=len(counts.ranks),
        batch_size=workload.batch_size,
        fanout=list(workload.num_neighbors),
        hidden=hidden,
        steps=counts.num_steps,
        edges=counts.num_edges,
        edges_per_rank=[sum(rank.edges) for rank in counts.ranks],
        input_rows_per_rank=[rank.sources[0] for rank in counts.ranks],
        rows_loaded_per_rank=[rank.rows_loaded for rank in counts.ranks],
        rows_sent_per_rank=[sum(rank.rows_sent) for rank in counts.ranks],
        bytes_sent_per_rank=[
            rank.rows_sent[0] * row_bytes + sum(rank.rows_sent[1:]) * hidden * 4 for rank in counts.ranks
        ],
        imbalance=max(work) * len(work) / (sum(work) or 1.0),
    )


def _work(rank: RankCounts) -> float:
    """Vertices and edges computed, weighted."""
    return C_V * sum(rank.destinations) + C_E * sum(rank.edges)
