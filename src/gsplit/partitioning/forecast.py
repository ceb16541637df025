"""Expected imbalance of work and of vertices, and cross edges, of a partitioned store for a number of ranks.

Parts are merged into runs of consecutive ones, one per rank; the counts of held-out mini-batches add up
(``PartStatistics``).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.graph.ownership import lightest_runs
from gsplit.store.manifest import PartStatistics, part_group_size

__all__ = ["Forecast", "forecast", "forecasts", "imbalance", "links_into_run"]

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
    shares = _shares(statistics, starts)
    links = np.asarray(statistics.links, np.float64)
    total = links.sum()
    crossing = float(1 - ((shares.T @ shares) * links).sum() / total) if total else 0.0
    return Forecast(
        num_ranks, float(imbalance(loads)), float(imbalance(sizes)), crossing, len(statistics.loads) % num_ranks == 0
    )


def links_into_run(statistics: PartStatistics, starts: list[int], run: int) -> npt.NDArray[np.float64]:
    """How often edges from each run of parts into one of them were drawn; run r begins with the part ``starts[r]``."""
    shares = _shares(statistics, starts)
    found: npt.NDArray[np.float64] = shares @ (shares[run] @ np.asarray(statistics.links, np.float64))
    return found


def _shares(statistics: PartStatistics, starts: list[int]) -> npt.NDArray[np.float64]:
    """``[r, g]``: the share of run r in the links of group g, by its share of the work.

    1 or 0, unless groups of several parts were counted and a run ends inside one: then as if edges inside the group
    were random.
    """
    parts = np.arange(len(statistics.loads))
    groups = parts // part_group_size(parts.size)
    loads = np.asarray(statistics.loads, np.float64) + 1.0  # no group without any
    shares = np.zeros((len(starts), len(statistics.links)))
    np.add.at(shares, (np.searchsorted(starts, parts, side="right") - 1, groups), loads)
    found: npt.NDArray[np.float64] = shares / np.bincount(groups, loads)
    return found


def forecasts(statistics: PartStatistics, part_boundaries: list[int]) -> list[Forecast]:
    """For 2 to 16 ranks, and those above that divide the parts, up to the number of groups that were counted."""
    parts = len(statistics.loads)
    numbers = [ranks for ranks in range(2, len(statistics.links) + 1) if ranks <= _FEW or parts % ranks == 0]
    return [forecast(statistics, part_boundaries, ranks) for ranks in numbers]
