"""Pairs on several ranks: verification, resuming on other ranks, and what the planner counts. See tests/exactness,
too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from link_programs import (
    PLANNED,
    count_links,
    store_with_pairs,
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
BOUND = 1e-9


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
