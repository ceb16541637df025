"""Pairs with times on several ranks are one process, on another numbering of the graph: losses, gradients, edges.

The edges of one process are compared with a loop in Python in tests/unit/loading/test_timed_links.py.
"""

from functools import cache

import numpy as np
import pytest
from temporal_link_programs import NEGATIVES, TimedLinkCase, TimedLinkResult, train_timed_links

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
BOUND = 1e-9
GRID = [
    *(TimedLinkCase(strategy, negatives=negatives) for strategy in STRATEGIES for negatives in NEGATIVES),
    *(TimedLinkCase(strategy, "last", exclude=True) for strategy in STRATEGIES),
]
SOME = [
    *(TimedLinkCase(strategy, parts="first", prefetch=1) for strategy in STRATEGIES),
    TimedLinkCase("data(owner)", "last", exclude=True),
    TimedLinkCase("split", batch_size=1),  # ranks without pairs, one time
    TimedLinkCase("hybrid(1)", negatives="decoded", prefetch=1),
]
RUNS = {(2, 1): GRID, (3, 1): SOME, (4, 1): SOME, (4, 2): GRID[::3]}


@cache
def _alone(temporal_strategy: str, negatives: str, exclude: object, batch_size: int) -> TimedLinkResult:
    """One process on the graph in its original order."""
    case = TimedLinkCase("split", temporal_strategy, negatives, exclude, "original", batch_size=batch_size)
    return train_timed_links(solo_mesh(), [case])[0]


def _wanted(case: TimedLinkCase) -> TimedLinkResult:
    return _alone(case.temporal_strategy, case.negatives, case.exclude, case.batch_size)


def _distance(found: TimedLinkResult, wanted: TimedLinkResult) -> float:
    differences = [abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    differences += [float(np.abs(a - b).max()) for a, b in zip(found.gradients, wanted.gradients, strict=True)]
    return max(differences)


@pytest.mark.parametrize(("ranks", "replicas"), RUNS)
def test_pairs_with_times_equal_one_process(ranks: int, replicas: int) -> None:
    cases = RUNS[ranks, replicas]
    together = run_ranks(train_timed_links, ranks, cases, replicas=replicas)
    largest = 0.0
    for case, results in zip(cases, zip(*together, strict=True), strict=True):
        wanted = _wanted(case)
        largest = max([largest, *(_distance(found, wanted) for found in results)])
        assert largest < BOUND, case
        for step in range(len(wanted.losses)):
            pairs = sorted(pair for found in results for pair in found.pairs[step])
            assert pairs == wanted.pairs[step], case  # every pair and negative on one rank, at its time
            edges = sorted(edge for found in results for edge in found.edges[step])
            assert set(edges) == set(wanted.edges[step]), case
            if case.strategy == "split" and replicas == 1:
                assert edges == wanted.edges[step], case
    print(f"{ranks} ranks, {replicas} replicas: largest difference {largest:.1e}")
    assert largest > 0  # other ranks add in another order: equal bits would mean that one process ran


def test_the_options_change_the_sample() -> None:
    """Otherwise equal results of both would say nothing."""
    found = [_wanted(TimedLinkCase(temporal_strategy=name)) for name in ("uniform", "last")]
    found.append(_wanted(TimedLinkCase("data(owner)", "last", exclude=True)))
    assert len({tuple(result.losses) for result in found}) == 3


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
@pytest.mark.parametrize("sample_device", [None, "sim:0"])
def test_a_device_computes_the_same_losses(sample_device: str | None) -> None:
    cases = [TimedLinkCase("split"), TimedLinkCase("data", "last", exclude=True), TimedLinkCase(negatives="triplet")]
    for results in run_ranks(train_timed_links, 2, cases, device="sim:0", sample_device=sample_device):
        for case, found in zip(cases, results, strict=True):
            assert _distance(found, _wanted(case)) < BOUND
