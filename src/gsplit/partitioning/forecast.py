"""Expected imbalance of work and of vertices, and cross edges, of a partitioned store for a number of ranks.

Parts are merged into contiguous runs, one per rank; the counts of presampling add up (``PartStatistics``).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.graph.ownership import lightest_runs
from gsplit.store.manifest import PartStatistics

__all__ = ["Forecast", "forecast", "forecasts", "imbalance"]

_FEW = 16


def imbalance(loads: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Largest over mean along the last axis; 1 where all are 0.

    >>> imbalance(np.array([[1, 3], [0, 0]])).tolist()
    [1.5, 1.0]
    """
    mean = loads.mean(axis=-1)
    return np.where(mean > 0, loads.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0)


@dataclass(frozen=True)
class Forecast:
    """Expectation per mini-batch for this many ranks. ``divides``: the number of ranks divides the parts."""

    ranks: int
    work_imbalance: float
    vertex_imbalance: float
    cross_edge_share: float
    divides: bool


def forecast(statistics: PartStatistics, part_boundaries: list[int], num_ranks: int) -> Forecast:
    """For one number of ranks, up to the number of parts."""
    starts = lightest_runs(statistics.loads, num_ranks)
    loads = np.add.reduceat(np.asarray(statistics.loads, np.float64), starts)
    sizes = np.add.reduceat(np.diff(part_boundaries), starts)
    links = np.add.reduceat(np.add.reduceat(np.asarray(statistics.links, np.float64), starts, axis=0), starts, axis=1)
    total = links.sum()
    crossing = float(1 - links.trace() / total) if total else 0.0
    return Forecast(
        num_ranks, float(imbalance(loads)), float(imbalance(sizes)), crossing, len(statistics.loads) % num_ranks == 0
    )


def forecasts(statistics: PartStatistics, part_boundaries: list[int]) -> list[Forecast]:
    """For 2 to 16 ranks, and those above that divide the parts."""
    parts = len(statistics.loads)
    numbers = [ranks for ranks in range(2, parts + 1) if ranks <= _FEW or parts % ranks == 0]
    return [forecast(statistics, part_boundaries, ranks) for ranks in numbers]
