"""Link prediction on several ranks is one process, on another numbering of the graph: losses, gradients, samples."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from link_programs import (
    PLANNED,
    LinkCase,
    LinkResult,
    count_links,
    evaluate_pairs,
    link_losses,
    link_store,
    pairs_of,
    store_with_pairs,
    train_links,
    train_piece_of_links,
    train_pieces_of_links,
    verify_links,
)

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import own_parts
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import count_strategies
from gsplit_bench.ranks import run_ranks

STRATEGIES = ("split", "data", "data(owner)", "data_cached", "hybrid(1)")
MODES = ("binary", "fraction", "triplet", "joint", "in_batch", "labels")
BOUND = 1e-9

GRID = [LinkCase(strategy, mode) for strategy in STRATEGIES for mode in MODES]
SOME = [
    *(LinkCase("split", mode, prefetch=2) for mode in MODES),
    *(LinkCase(strategy, "binary", exclude=exclude) for strategy in ("split", "data") for exclude in (True, False)),
    *(LinkCase(strategy, "in_batch", parts="first", batch_size=3) for strategy in STRATEGIES),
    *(LinkCase(strategy, "triplet", parts="first", prefetch=1) for strategy in STRATEGIES),
    *(
        LinkCase(strategy, "binary", sampler=sampler)
        for strategy in ("split", "data")
        for sampler in ("labor", "replace")
    ),
]
RUNS: list[tuple[int, int, list[LinkCase]]] = [
    (2, 1, GRID),
    (3, 1, SOME),
    (4, 1, SOME[1::2]),
    (4, 2, [*GRID[::4], *SOME[:6:2]]),
]


@cache
def _alone(mode: str, exclude: Any, batch_size: int, sampler: str = "uniform") -> LinkResult:
    """One process on the graph in its original order."""
    case = LinkCase("split", mode, exclude, parts="original", batch_size=batch_size, sampler=sampler)
    return train_links(solo_mesh(), [case])[0]


@cache
def _together(ranks: int, replicas: int) -> list[list[LinkResult]]:
    """The results of every case, of all ranks. One start of ranks for all cases."""
    cases = next(found for number, split, found in RUNS if (number, split) == (ranks, replicas))
    results = run_ranks(train_links, ranks, cases, replicas=replicas)
    return [list(found) for found in zip(*results, strict=True)]


def _cases(ranks: int, replicas: int) -> list[tuple[LinkCase, list[LinkResult], LinkResult]]:
    cases = next(found for number, split, found in RUNS if (number, split) == (ranks, replicas))
    return [
        (case, found, _alone(case.negatives, case.exclude, case.batch_size, case.sampler))
        for case, found in zip(cases, _together(ranks, replicas), strict=True)
    ]


def _distance(found: LinkResult, wanted: LinkResult) -> float:
    assert len(found.losses) == len(wanted.losses) > 0
    differences = [abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    differences += [float(np.abs(a - b).max()) for a, b in zip(found.gradients, wanted.gradients, strict=True)]
    return max(differences)


@pytest.mark.parametrize(("ranks", "replicas"), [run[:2] for run in RUNS])
def test_losses_and_gradients_are_those_of_one_process(ranks: int, replicas: int) -> None:
    largest = 0.0
    for case, results, wanted in _cases(ranks, replicas):
        for found in results:
            largest = max(largest, _distance(found, wanted))
            assert largest < BOUND, case
    print(f"{ranks} ranks, {replicas} replicas: largest difference {largest:.1e}")
    assert largest > 0  # other ranks add in another order: equal bits would mean that one process ran


@pytest.mark.parametrize(("ranks", "replicas"), [run[:2] for run in RUNS])
def test_every_pair_is_on_one_rank_with_its_negatives(ranks: int, replicas: int) -> None:
    """Negatives do not depend on the ranks and the numbering; internal ids would (they differ between the stores)."""
    ids = link_store("mixed")[0].internal_ids
    assert not np.array_equal(ids, link_store("original")[0].internal_ids)
    for case, results, wanted in _cases(ranks, replicas):
        for step, pairs in enumerate(wanted.pairs):
            joined: dict[int, Any] = {}
            others: list[Any] = []
            for found in results:
                own = dict(found.pairs[step])
                others += own.pop(-1, [])
                assert not joined.keys() & own.keys(), case
                joined |= own
            assert joined == {position: ends for position, ends in pairs.items() if position >= 0}, case
            assert sorted(others) == pairs.get(-1, []), case


@pytest.mark.parametrize(("ranks", "replicas"), [run[:2] for run in RUNS])
def test_split_samples_every_edge_once_and_others_more(ranks: int, replicas: int) -> None:
    for case, results, wanted in _cases(ranks, replicas):
        total = sum(found.num_edges for found in results)
        if case.strategy == "split" and replicas == 1:
            assert total == wanted.num_edges, case
        else:
            assert total >= wanted.num_edges, case
        for step, edges in enumerate(wanted.edges):
            assert set(edges) == {edge for found in results for edge in found.edges[step]}, case


def _left_out(pairs: LinkResult, step: int, exclude: Any) -> set[tuple[int, int]]:
    listed = pairs_of().T.tolist()
    found = {tuple(listed[position]) for position in pairs.pairs[step] if position >= 0}
    if exclude == "reverse":
        found |= {(v, u) for u, v in found}
    return found if exclude else set()


@pytest.mark.parametrize(("ranks", "replicas"), [run[:2] for run in RUNS])
def test_no_block_has_an_excluded_edge(ranks: int, replicas: int) -> None:
    for case, results, wanted in _cases(ranks, replicas):
        for step in range(len(wanted.losses)):
            left_out = _left_out(wanted, step, case.exclude)
            for found in results:
                assert not left_out & set(found.edges[step]), case


def test_data_parallel_ranks_draw_edges_of_pairs_of_other_ranks() -> None:
    """So excluding by the rows of a rank's own pairs, or of its targets, would leave these edges in."""
    own: set[tuple[int, int, int]] = set()
    drawn: set[tuple[int, int, int]] = set()
    listed = pairs_of().T.tolist()
    for case, results, _ in _cases(3, 1):
        if case.strategy != "data" or case.exclude is not False:
            continue
        for step in range(3):
            of_all = {tuple(listed[p]) for found in results for p in found.pairs[step] if p >= 0}
            for found in results:
                mine = {tuple(listed[p]) for p in found.pairs[step] if p >= 0}
                own |= {(step, *edge) for edge in mine}
                drawn |= {(step, *edge) for edge in (of_all - mine) & set(found.edges[step])}
    assert own and drawn


def test_ranks_have_targets_without_pairs_and_other_numbers_of_both() -> None:
    """So a mean over targets would be wrong."""
    counts = [
        count
        for case, results, _ in _cases(3, 1)
        if case.strategy == "split" and case.parts == "first"
        for found in results
        for count in found.counts
    ]
    assert any(targets and not pairs for targets, pairs, _ in counts)
    assert any(not targets and not pairs for targets, pairs, _ in counts)
    assert any(targets != values for targets, _, values in counts)


def test_the_default_excludes_edges_that_would_be_drawn() -> None:
    kept = _alone("binary", False, 16)
    removed = _alone("binary", "reverse", 16)
    assert sum(len(_left_out(kept, step, "reverse") & set(kept.edges[step])) for step in range(3)) > 0
    assert removed.num_edges < kept.num_edges and removed.losses != kept.losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_verify_accepts_encoders_and_models_that_decode_pairs(ranks: int) -> None:
    for results in run_ranks(verify_links, ranks):
        for name, loss_error, gradient_error, ok in results:
            assert ok and loss_error < BOUND and gradient_error < BOUND, (name, loss_error, gradient_error)
    print(f"{ranks} ranks: largest {max(max(found[1:3]) for found in results):.1e}")


def test_a_training_of_pairs_continues_on_other_ranks(tmp_path: Path) -> None:
    """1 -> 2 -> 1 ranks, with other prefetching, in the middle of an epoch of three steps."""
    losses, weights = train_piece_of_links(solo_mesh(), 7)
    train_piece_of_links(solo_mesh(), 2, save_to=tmp_path / "a")
    pieces = [{"stop": 5, "begin_from": tmp_path / "a", "save_to": tmp_path / "b", "prefetch": 2}]
    for ((found, _),) in run_ranks(train_pieces_of_links, 2, pieces):
        assert found == pytest.approx(losses[:5], abs=BOUND)
    found, last = train_piece_of_links(solo_mesh(), 7, begin_from=tmp_path / "b")
    assert found == pytest.approx(losses, abs=BOUND)
    assert max(float(np.abs(a - b).max()) for a, b in zip(last, weights, strict=True)) < BOUND
    again, same = train_piece_of_links(solo_mesh(), 7, begin_from=tmp_path / "a")
    assert again == losses and all(np.array_equal(a, b) for a, b in zip(same, weights, strict=True))


@pytest.mark.parametrize("hosts", [(2,), (3,), (2, 2)], ids=lambda hosts: f"{len(hosts)} x {hosts[0]}")
def test_rankings_are_those_of_one_process(hosts: tuple[int, ...]) -> None:
    (wanted,) = evaluate_pairs(solo_mesh(), ["original"])
    for results in run_ranks(evaluate_pairs, sum(hosts), ["mixed", "first"], hosts=hosts):
        for of_numbering in results:
            for found, want in zip(of_numbering, wanted, strict=True):
                assert found == pytest.approx(want, abs=BOUND)
    assert all(0 < found["mrr"] < 1 and found["hits@1"] <= found["hits@10"] for found in wanted)


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_the_planner_counts_what_ranks_draw(ranks: int, replicas: int, tmp_path: Path) -> None:
    """Per rank and layer, and the rows of endpoints that cross, on a store that was partitioned for its pairs."""
    plain = store_with_pairs(tmp_path / "plain.gsplit")
    splits = ranks // replicas
    pairs: dict[str, Any] = {"pairs": "train", "neg_sampling": "triplet", "num_negatives": 2}
    options: dict[str, Any] = {"batch_size": 50, "solver": "restream", "epochs": 2}
    store = gsplit.partition(plain, tmp_path / "parted.gsplit", splits, [4, 3], **options, **pairs)
    workload = Workload.of_store(store, None, [4, 3], 50, pairs=PLANNED)
    ownership = own_parts(store.part_boundaries, splits, store.part_loads)
    counted = count_strategies(workload, ownership, list(STRATEGIES), replicas=replicas, steps=2)
    found = run_ranks(count_links, ranks, str(store.path), list(STRATEGIES), replicas=replicas)
    crossing = 0.0
    for number, (strategy, counts) in enumerate(zip(STRATEGIES, counted, strict=True)):
        assert strategy == counts.spec.name
        for rank, planned in enumerate(counts.in_place().ranks):
            own = found[rank][number]
            assert planned.edges == tuple(np.mean([step[0] for step in own], axis=0)), strategy
            assert planned.destinations == tuple(np.mean([step[1] for step in own], axis=0)), strategy
            assert planned.rows_loaded == np.mean([step[2] for step in own]), strategy
            assert counts.ranks[rank].rows_loaded == np.mean([step[4] for step in own]), strategy
            assert sum(planned.rows_sent) + planned.endpoints_sent == np.mean([step[5] for step in own]), strategy
            crossed = tuple(np.mean([step[3] for step in own], axis=0))
            assert (planned.endpoints_sent, planned.endpoints_received) == crossed, strategy
            crossing += planned.endpoints_sent
    assert crossing > 0 and counted[0].exchanged_levels == (0, 1, 2)


@pytest.mark.parametrize("sample_device", [None, "sim:0"])
def test_a_device_computes_the_same_losses(sample_device: str | None) -> None:
    """Sampled on the host, where pairs are pinned and copied, and on the device, where edges are excluded by torch."""
    prefetch = 2 if sample_device is None else 1  # as many sampling threads
    cases = [
        LinkCase("split", "binary", prefetch=prefetch),
        LinkCase("data", "triplet"),
        LinkCase("hybrid(1)", "in_batch"),
        LinkCase("split", "joint", parts="first"),
    ]
    wanted = [_alone(case.negatives, "reverse", case.batch_size).losses for case in cases]
    for results in run_ranks(link_losses, 2, cases, device="sim:0", sample_device=sample_device):
        for found, want in zip(results, wanted, strict=True):
            assert found == pytest.approx(want, abs=BOUND)
