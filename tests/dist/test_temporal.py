"""Temporal sampling on several ranks is one process, on another numbering of the graph: outputs, losses, gradients."""

from functools import cache

import numpy as np
import pytest
from temporal_programs import TemporalCase, TemporalResult, temporal_losses, train_temporal

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks

STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
BOUND = 1e-9

GRID = [
    TemporalCase(strategy, temporal_strategy, model)
    for strategy in STRATEGIES
    for temporal_strategy, model in (("uniform", "sage"), ("last", "sage"), ("uniform", "gat"))
]
SOME = [
    *(TemporalCase(strategy, prefetch=2) for strategy in (*STRATEGIES, "data(owner)")),
    *(TemporalCase(strategy, "last", "gat", parts="first", prefetch=1) for strategy in STRATEGIES),
    *(TemporalCase(strategy, parts="first", batch_size=1) for strategy in ("split", "data", "hybrid(1)")),
]
RUNS: list[tuple[int, int, list[TemporalCase]]] = [
    (2, 1, GRID),
    (3, 1, SOME),
    (4, 1, SOME),
    (4, 2, [*GRID[::2], *SOME[:2]]),
]

# every change: 3 ranks with the same cases, of which one owns nothing, and the grid on 2 ranks and 2 x 2
on_ranks = pytest.mark.parametrize(
    ("ranks", "replicas"), [(2, 1), (3, 1), pytest.param(4, 1, marks=pytest.mark.weekly), (4, 2)]
)


@cache
def _alone(temporal_strategy: str, model: str, batch_size: int) -> TemporalResult:
    """One process on the graph in its original order."""
    case = TemporalCase("split", temporal_strategy, model, parts="original", batch_size=batch_size)
    return train_temporal(solo_mesh(), [case])[0]


@cache
def _together(ranks: int, replicas: int) -> list[tuple[TemporalCase, list[TemporalResult], TemporalResult]]:
    """Every case with the results of all ranks and of one process. One start of ranks for all cases."""
    cases = next(found for number, split, found in RUNS if (number, split) == (ranks, replicas))
    results = run_ranks(train_temporal, ranks, cases, replicas=replicas)
    alone = [_alone(case.temporal_strategy, case.model, case.batch_size) for case in cases]
    return [
        (case, list(found), want) for case, found, want in zip(cases, zip(*results, strict=True), alone, strict=True)
    ]


def _distance(found: TemporalResult, wanted: TemporalResult) -> float:
    assert len(found.losses) == len(wanted.losses) > 0
    differences = [abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    differences += [float(np.abs(a - b).max()) for a, b in zip(found.gradients, wanted.gradients, strict=True)]
    for ours, theirs in zip(found.outputs, wanted.outputs, strict=True):
        differences += [float(np.abs(np.subtract(out, theirs[target])).max()) for target, out in ours.items()]
    return max(differences)


@on_ranks
def test_outputs_losses_and_gradients_are_those_of_one_process(ranks: int, replicas: int) -> None:
    largest = 0.0
    for case, results, wanted in _together(ranks, replicas):
        for found in results:
            largest = max(largest, _distance(found, wanted))
            assert largest < BOUND, case
        for step, targets in enumerate(wanted.outputs):  # every target on one rank
            assert sorted(t for found in results for t in found.outputs[step]) == sorted(targets), case
    print(f"{ranks} ranks, {replicas} replicas: largest difference {largest:.1e}")
    assert largest > 0  # other ranks add in another order: equal bits would mean that one process ran


@on_ranks
def test_the_edges_are_those_of_one_process_and_none_is_later_than_its_target(ranks: int, replicas: int) -> None:
    for case, results, wanted in _together(ranks, replicas):
        assert wanted.late == 0 and sum(len(edges) for edges in wanted.edges) > 0
        assert not any(found.late for found in results), case
        for step, edges in enumerate(wanted.edges):
            assert {edge for found in results for edge in found.edges[step]} == set(edges), case
            if case.strategy == "split" and replicas == 1:
                assert sum(len(found.edges[step]) for found in results) == len(edges), case


def test_the_options_change_the_sample() -> None:
    """Otherwise equal results of both would say nothing."""
    uniform, last = (_alone(strategy, "sage", 25) for strategy in ("uniform", "last"))
    assert uniform.losses != last.losses
    assert _mean_time(last) > 1.1 * _mean_time(uniform)


def _mean_time(found: TemporalResult) -> float:
    return float(np.mean([time for edges in found.edges for *_, time in edges]))


@pytest.mark.parametrize("sample_device", [None, "sim:0"])
def test_a_device_computes_the_same_losses(sample_device: str | None) -> None:
    """Sampled on the host, whose times are pinned and copied, and on the device, by torch operations."""
    prefetch = 2 if sample_device is None else 1  # as many sampling threads
    cases = [
        TemporalCase("split", prefetch=prefetch),
        TemporalCase("data", "last"),
        TemporalCase("hybrid(1)"),
        TemporalCase("split", "last", parts="first"),
    ]
    wanted = [_alone(case.temporal_strategy, case.model, case.batch_size).losses for case in cases]
    for results in run_ranks(temporal_losses, 2, cases, device="sim:0", sample_device=sample_device):
        for found, want in zip(results, wanted, strict=True):
            assert found == pytest.approx(want, abs=BOUND)
