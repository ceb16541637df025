"""What a partitioned store promises for a number of ranks: expected imbalance of work and share of cross edges.

Parts are merged into contiguous runs, one per rank; what presampling counted of the parts adds up (``PartStatistics``).
"""

from dataclasses import dataclass

import numpy as np

from gsplit.ownership import lightest_runs
from gsplit.store.manifest import PartStatistics

__all__ = ["Forecast", "forecast", "forecasts"]

_FEW = 16


@dataclass(frozen=True)
class Forecast:
    """For this many ranks, per mini-batch. ``whole``: every rank has as many parts."""

    ranks: int
    work_imbalance: float
    cross_edge_share: float
    whole: bool


def forecast(statistics: PartStatistics, num_ranks: int) -> Forecast:
    """For one number of ranks, up to the number of parts."""
    starts = lightest_runs(statistics.loads, num_ranks)
    loads = np.add.reduceat(np.asarray(statistics.loads, np.float64), starts)
    links = np.add.reduceat(np.add.reduceat(np.asarray(statistics.links, np.float64), starts, axis=0), starts, axis=1)
    total = links.sum()
    crossing = float(1 - links.trace() / total) if total else 0.0
    imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
    return Forecast(num_ranks, imbalance, crossing, len(statistics.loads) % num_ranks == 0)


def forecasts(statistics: PartStatistics) -> list[Forecast]:
    """For every number of ranks up to 16, and those above that divide the parts."""
    parts = len(statistics.loads)
    return [forecast(statistics, ranks) for ranks in range(2, parts + 1) if ranks <= _FEW or parts % ranks == 0]
