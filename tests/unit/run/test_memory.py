"""The forecast of memory: what it is made of, and where it takes its numbers from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import sample_store
from typed_models import COUNTS, WIDTHS, make_data

import gsplit
from gsplit.errors import InputError
from gsplit.features.cache import cached_order, expected_hit_rate
from gsplit.run.memory import MemoryPlan, forecast_memory
from gsplit.store.feature_types import write_with_features
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("memory")
    plain = sample_store(folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 4, [3, 3], batch_size=20, epochs=3)


def _measured(store: Store) -> tuple[float, float, float]:
    """Per step of one rank: input rows, edges, and destinations of all layers."""
    batches = list(gsplit.NeighborLoader(store, [3, 3], "train", batch_size=20))
    sizes = [(b.x.size(0), sum(k.num_edges for k in b.blocks), sum(k.num_dst for k in b.blocks)) for b in batches]
    rows, edges, computed = np.mean(sizes, axis=0).tolist()
    return rows, edges, computed


def test_mini_batches_are_those_that_were_counted(parted: Store) -> None:
    (found,) = forecast_memory(parted, MemoryPlan(hidden=100))
    rows, edges, computed = _measured(parted)
    assert found.basis == "counted over 16 mini-batches by gsplit partition"
    assert found.input_rows == pytest.approx(rows, rel=0.02)
    assert found.edges == pytest.approx(edges, rel=0.02)
    assert found.anonymous["hidden rows"] == pytest.approx(6 * 400 * computed, rel=0.02)
    assert found.num_bytes == sum(found.anonymous.values()) > found.anonymous["program"] > 50e6


def test_ranks_share_what_one_would_hold(parted: Store) -> None:
    (one,), two = (forecast_memory(parted, MemoryPlan(ranks=ranks)) for ranks in (1, 2))
    assert sum(rank.num_vertices for rank in two) == 300
    assert sum(rank.edges for rank in two) == pytest.approx(one.edges)
    assert sum(rank.anonymous["targets"] for rank in two) == one.anonymous["targets"] == 32 * 150
    opened = [rank.anonymous["comparison of the first step"] for rank in (one, *two)]
    assert opened == [0, 20 * 300 + 32 * 150, 0]
    (unchecked, _) = forecast_memory(parted, MemoryPlan(ranks=2, compares=False))
    assert unchecked.num_bytes == two[0].num_bytes - opened[1]
    assert sum(rank.mapped["features"] for rank in two) == one.mapped["features"] == 300 * 20
    assert one.input_rows < sum(rank.input_rows for rank in two) < 2 * one.input_rows  # some are received


def test_cache_and_disk(parted: Store, tmp_path: Path) -> None:
    plan = MemoryPlan(ranks=2, cache_bytes=1000, on_disk=True)
    first, second = forecast_memory(parted, plan)
    hotness = parted.stored_array("hotness")
    order = cached_order(parted, 0, first.num_vertices, ["x"], 1000)
    assert first.expected_hit_rate == expected_hit_rate(hotness[: first.num_vertices], order)
    assert first.expected_hit_rate > 50 / first.num_vertices
    assert [rank.anonymous["cache"] for rank in (first, second)] == [1000, 1000]
    assert (first.mapped["features"], first.anonymous["scales"]) == (0, 0)
    small = write_with_features(parted, tmp_path / "c.gsplit", "int8")
    scaled, _ = forecast_memory(small, plan)
    assert scaled.anonymous["scales"] == 4 * scaled.num_vertices
    assert scaled.expected_hit_rate is not None and scaled.expected_hit_rate > first.expected_hit_rate
    assert scaled.anonymous["mini-batches"] == first.anonymous["mini-batches"]  # rows arrive as float32
    (plain,) = forecast_memory(parted, MemoryPlan())
    assert plain.expected_hit_rate is None


@pytest.mark.parametrize("plan", [MemoryPlan(batch_size=40), MemoryPlan(num_neighbors=(2, -1))])
def test_other_mini_batches_are_bounded(plan: MemoryPlan, parted: Store) -> None:
    (found,) = forecast_memory(parted, plan)
    fanouts, size = list(plan.num_neighbors or (3, 3)), plan.batch_size or 20
    assert found.basis.startswith(f"bounded by fanouts {','.join(map(str, fanouts))} and batch size {size}")
    rows = [batch.x.size(0) for batch in gsplit.NeighborLoader(parted, fanouts, "train", batch_size=size)]
    assert max(rows) <= found.input_rows <= 300


def test_an_unpartitioned_store_has_a_bound_and_no_cache(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    (found,) = forecast_memory(store, MemoryPlan())
    assert found.basis.startswith("bounded by fanouts 15,15,15 and batch size 1024")
    assert found.mapped["ids"] == 0
    with pytest.raises(InputError, match="expected a partitioned store"):
        forecast_memory(store, MemoryPlan(cache_bytes=1))


def test_rows_are_counted_by_vertex_type(tmp_path: Path) -> None:
    """Types have features of other widths and types, and one has none of a name."""
    data = make_data()
    data["paper"].z = torch.zeros(COUNTS["paper"], 7, dtype=torch.float32)
    data["paper"].train_mask = torch.arange(COUNTS["paper"]) % 3 == 0
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    stored = {of: COUNTS[of] * WIDTHS[of] * 8 for of in WIDTHS}
    (one,) = forecast_memory(store, MemoryPlan(targets="paper/train"))
    assert one.mapped["features"] == sum(stored.values())
    (wide,) = forecast_memory(store, MemoryPlan(targets="paper/train", features=("x", "z")))
    assert wide.mapped["features"] == sum(stored.values()) + COUNTS["paper"] * 7 * 4
    assert wide.anonymous["mini-batches"] > one.anonymous["mini-batches"]
    options: dict[str, Any] = {"batch_size": 12, "solver": "random", "objective": "random", "epochs": 1}
    parted = gsplit.partition(store, tmp_path / "p.gsplit", 2, [3, 2], "paper/train", **options)
    plan = MemoryPlan(ranks=2, targets="paper/train", cache_bytes=500)
    ranks = forecast_memory(parted, plan)
    assert sum(rank.mapped["features"] for rank in ranks) == sum(stored.values())
    for rank in ranks:
        assert 0 < rank.anonymous["cache"] <= 500
        assert rank.expected_hit_rate is not None and 0 < rank.expected_hit_rate < 1


def test_a_part_cut_in_two_is_bounded_and_a_shard_refused(parted: Store, tmp_path: Path) -> None:
    made = gsplit.partition(
        sample_store(tmp_path / "g.gsplit"), tmp_path / "p.gsplit", 1, [3, 3], batch_size=20, epochs=1
    )
    assert forecast_memory(made, MemoryPlan())[0].basis.startswith("counted")
    halves = forecast_memory(made, MemoryPlan(ranks=2))
    assert all(rank.basis.startswith("bounded") and rank.input_rows > 0 for rank in halves)
    shard = write_shard(parted, tmp_path / "s.gsplit", 0, 100)
    with pytest.raises(InputError, match="s.gsplit: expected a whole store .got a shard"):
        forecast_memory(shard, MemoryPlan())


def test_batches_made_ahead_and_copies_are_counted(parted: Store) -> None:
    (plain,), (ahead,) = (forecast_memory(parted, MemoryPlan(prefetch=depth)) for depth in (0, 2))
    assert ahead.anonymous["mini-batches"] == pytest.approx(2 * plain.anonymous["mini-batches"], abs=2)
    (three,) = forecast_memory(parted, MemoryPlan(prefetch=3, sampling_threads=3))
    assert three.anonymous["sampler tables"] == 3 * plain.anonymous["sampler tables"]
    alone, both = (
        forecast_memory(parted, MemoryPlan(copies_bytes=100))[0],
        forecast_memory(parted, MemoryPlan(2, copies_bytes=100)),
    )
    assert alone.anonymous["copies"] == 0 and [found.anonymous["copies"] for found in both] == [100, 100]
