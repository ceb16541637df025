"""Copies of foreign rows change no bit of a result on real ranks, and rows that are copied do not travel.

The ranks exchange over the process group, as those of several hosts: ranks of one host would read all rows in place.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from copies_programs import copies_on_one_rank_only, train_with_copies

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import own_parts
from gsplit.partitioning.presample import Workload
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.store.shard import host_range, write_shard
from gsplit_bench.loading import count_split, received_with_copies
from gsplit_bench.ranks import run_ranks

VERTICES, FEATURES = 1500, 8
ROW = 4 * FEATURES
BUDGETS = [0, ROW - 1, 40 * ROW, 300 * ROW, VERTICES * ROW]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("copies")
    planted = PlantedGraph(VERTICES, 15_000, num_communities=12, num_features=FEATURES, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 5, [4, 4], batch_size=128, solver="restream", epochs=2)


def _of_one_part(store: Store) -> list[int]:
    """Targets that one rank owns alone: the others have none."""
    first, stop = store.part_boundaries[:2]
    return sorted(store.original_ids(first, stop).tolist())[:200]


@pytest.mark.parametrize(
    "ranks, replicas, shards, one_part",
    [
        pytest.param(2, 1, True, False, id="shards"),
        pytest.param(3, 1, False, False, id="three", marks=pytest.mark.weekly),
        pytest.param(3, 1, False, True, id="ranks without targets"),
        pytest.param(4, 2, False, False, id="replicas", marks=pytest.mark.weekly),
    ],
)
def test_no_budget_changes_a_bit(
    ranks: int, replicas: int, shards: bool, one_part: bool, store: Store, tmp_path: Path
) -> None:
    paths = [str(store.path)] * ranks
    if shards:
        paths = [str(tmp_path / f"shard-{rank}.gsplit") for rank in range(ranks)]
        for rank, path in enumerate(paths):
            write_shard(store, Path(path), *host_range(store, rank, ranks))
    targets = _of_one_part(store) if one_part else None
    for found in run_ranks(train_with_copies, ranks, paths, BUDGETS, targets, replicas=replicas, shared_memory=False):
        (losses, weights, without), *others = found
        assert len(losses) > 2
        assert all(other[0] == losses and other[1] == weights for other in others)
        counts = [without, *(other[2] for other in others)]
        assert counts[1] == without  # not even one row fits
        received = [count["rows_received"] for count in counts]
        assert received[0] == received[1] and all(more > fewer for more, fewer in pairwise(received[1:]))
        assert all(count["rows_received"] + count["rows_copied"] == received[0] for count in counts)
        assert all(count["collectives"] == without["collectives"] for count in counts)
        sizes = [count["bytes_received"] for count in counts]
        assert all(a - b == ROW * (m - n) for (a, b), (m, n) in zip(pairwise(sizes), pairwise(received), strict=True))


def test_one_process_copies_nothing(store: Store) -> None:
    without, copied = train_with_copies(solo_mesh(), [str(store.path)], [0, 300 * ROW], None)
    assert copied[:2] == without[:2] and copied[2]["rows_copied"] == 0


def test_real_ranks_exchange_what_is_counted_without_them(store: Store) -> None:
    """Two layers: rows of both are in the counter, those of layer 1 do not depend on the copies."""
    workload = Workload.of_store(store, "train", [4, 4], 128, seed=5)
    ownership = own_parts(store.part_boundaries, 2, store.part_loads)
    budgets = [0, 40, 300]
    found = run_ranks(
        train_with_copies, 2, [str(store.path)] * 2, [ROW * rows for rows in budgets], None, shared_memory=False
    )
    real = [sum(rank[i][2]["rows_received"] for rank in found) for i in range(len(budgets))]
    hotness = store.stored_array("hotness")
    epochs = [count_split(workload, ownership, epoch) for epoch in range(2)]
    counted = [
        sum(received_with_copies(hotness, store.part_boundaries, ownership, epoch, rows)[1] for epoch in epochs)
        for rows in budgets
    ]
    assert [real[0] - rows for rows in real] == [counted[0] - rows for rows in counted]
    assert counted[0] > counted[1] > counted[2] > 0


def test_ranks_with_different_budgets_are_told(store: Store) -> None:
    said = run_ranks(copies_on_one_rank_only, 2, str(store.path))
    assert all("NeighborLoader: copies: expected the same on every rank" in text for text in said)


def test_what_cannot_have_copies_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(gsplit.InputError, match="copies: expected a strategy that shuffles input rows"):
        gsplit.NeighborLoader(store, [4], "train", strategy="data", copies=10)
    with pytest.raises(gsplit.InputError, match="copies: expected a size in bytes"):
        gsplit.NeighborLoader(store, [4], "train", copies=-1)
    planted = PlantedGraph(50, 200, num_features=2)
    plain = build_store(synthetic_source(planted), tmp_path / "plain.gsplit")
    with pytest.raises(gsplit.InputError, match="expected a partitioned store, .*gsplit partition"):
        gsplit.NeighborLoader(plain, [4], "train", copies=10)
