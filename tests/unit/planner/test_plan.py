"""A plan ranks what can be run, gives reasons that follow from the figures, and one process is one of the choices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gsplit
from gsplit.errors import InputError
from gsplit.partitioning.forecast import forecast
from gsplit.partitioning.presample import Workload
from gsplit.planner.hardware import PRESETS
from gsplit.planner.placement import Loading
from gsplit.planner.plan import Candidate, Plan, StepTime, choose, make_plan, rank_timed, shortlist
from gsplit.planner.shapes import PlannedModel
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store

GPU = PRESETS["v100-nvlink"]
QUICK = replace(GPU, collective_s=0.0, collective_per_rank_s=0.0, step_s=0.0, load_s=0.0, sample_s=0.0)
SHAPE = PlannedModel("sage", 16, 32, 4, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("plan")
    planted = PlantedGraph(3000, 40_000, num_communities=12, num_features=16, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 4, [4, 4], batch_size=128, solver="restream", epochs=2)


@pytest.fixture(scope="module")
def workload(store: Store) -> Workload:
    return Workload.of_store(store, "train", [4, 4], 128)


def _names(plan: Plan) -> list[str]:
    return [candidate.setup.name for candidate in plan.candidates]


def test_every_strategy_and_replica_is_a_candidate(store: Store, workload: Workload) -> None:
    plan = make_plan(store, workload, SHAPE, GPU, 4)
    several = {"split", "split x 2", "hybrid(1)", "hybrid(1) x 2", "data_cached", "data_cached(strided)"}
    assert set(_names(plan)) == several | {"data", "data(owner)", "one process"}
    walls = [candidate.step.wall_s for candidate in plan.candidates]
    assert walls == sorted(walls) and plan.best.setup.name in plan.reason


def test_rows_that_are_dear_to_read_are_read_once_and_those_dear_to_send_stay(store: Store, workload: Workload) -> None:
    slow_reads = make_plan(store, workload, SHAPE, replace(QUICK, load_bytes_per_s=1e5), 4)
    assert slow_reads.best.step.counts.spec.split_layers is not None
    assert "input rows" in slow_reads.reason and "loading rows" in slow_reads.reason
    slow_links = make_plan(store, workload, SHAPE, replace(QUICK, exchange_bytes_per_s=1e3), 4)
    assert slow_links.best.setup.strategy in ("data", "data(owner)")


def test_one_process_is_best_where_ranks_share_one_core(store: Store, workload: Workload) -> None:
    plan = make_plan(store, workload, SHAPE, replace(QUICK, cores=1, collective_s=1e-3), 4)
    assert plan.best.setup.name == "one process" and "use one process" in plan.reason
    assert any("4 ranks share 1 cores" in note for note in plan.notes)
    choice = choose(store, workload, 4, replace(QUICK, cores=1, collective_s=1e-3))
    assert choice.strategy == "data(owner)" and "use one process" in choice.reason


def test_choose_takes_the_fastest_of_the_strategies_allowed(store: Store, workload: Workload) -> None:
    slow_reads = replace(QUICK, load_bytes_per_s=1e5)
    options: dict[str, Any] = {"strategies": ("data", "split"), "loading": Loading(device_cache_bytes=0)}
    assert choose(store, workload, 4, slow_reads, shape=SHAPE, **options).strategy == "split"
    assert choose(store, workload, 4, slow_reads, replicas=2, **options).strategy == "split"
    cached = choose(store, workload, 4, slow_reads, shape=SHAPE, strategies=("data", "split"))
    assert cached.strategy == "data"  # every device holds all rows, and data sends none


def test_a_cache_answers_rows_and_takes_memory(store: Store, workload: Workload) -> None:
    slow_disk = replace(QUICK, disk_bytes_per_s=1e6, cores=2)
    plain, cached = (
        next(
            candidate
            for candidate in make_plan(
                store,
                workload,
                SHAPE,
                slow_disk,
                2,
                loading=Loading(on_disk=True, cache_bytes=size, device_cache_bytes=0),
                strategies=("split",),
            ).candidates
            if candidate.setup.name == "split"
        )
        for size in (0, 50_000)
    )
    assert cached.step.stages.load < 0.8 * plain.step.stages.load
    assert cached.memory.own == plain.memory.own + 50_000
    assert plain.memory.mapped > 0


def test_what_does_not_fit_comes_last(store: Store, workload: Workload) -> None:
    found = make_plan(store, workload, SHAPE, GPU, 4)
    owns = sorted(candidate.memory.own for candidate in found.candidates)
    tight = make_plan(store, workload, SHAPE, replace(GPU, memory_bytes=owns[len(owns) // 2]), 4)
    fits = [candidate.fits for candidate in tight.candidates]
    assert fits == sorted(fits, reverse=True) and not all(fits) and any(fits)
    compared, _, others = tight.reason.partition(" Not enough memory for ")
    left = [candidate.setup.name for candidate in tight.candidates if not candidate.fits]
    assert others == f"{', '.join(left)}." and not any(f" {name} takes" in compared for name in left)
    assert "Not enough memory" not in found.reason
    none = make_plan(store, workload, SHAPE, replace(GPU, memory_bytes=1.0), 2)
    assert any("nothing fits" in note for note in none.notes)


def test_times_decide_among_the_best_unless_they_are_level(store: Store, workload: Workload) -> None:
    host = replace(GPU, cores=4)
    plan = make_plan(store, workload, SHAPE, host, 4)
    best = shortlist(plan.candidates, host)
    assert best == list(plan.candidates[:3])
    first, second, third = (candidate.setup for candidate in best)
    slower = StepTime(0.99, 3.0, 5)
    level = rank_timed(plan, {first: StepTime(1.0, 3.0, 5), second: slower, third: StepTime(2.0, 3.0, 5)})
    assert _names(level) == _names(plan)  # 1 % is noise
    timed = rank_timed(plan, {first: StepTime(1.1, 3.0, 5), second: slower, third: StepTime(0.5, 3.0, 5)})
    assert [candidate.setup for candidate in timed.candidates[:3]] == [third, second, first]
    assert timed.best.timed == StepTime(0.5, 3.0, 5) and timed.candidates[3].timed is None
    assert f"{third.name} is fastest: 0.5 s per step, the median of 5 timed steps" in timed.reason
    tight = replace(host, memory_bytes=best[0].needed_bytes + best[2].needed_bytes)
    assert shortlist([best[0], replace(best[1], needed_bytes=1e12), best[2]], tight) == [best[0], best[2]]


def test_a_device_holds_its_share_of_the_graph_and_the_hottest_rows(store: Store, workload: Workload) -> None:
    def plan(**options: Any) -> dict[str, Candidate]:
        loading = Loading(**options)
        made = make_plan(store, workload, SHAPE, QUICK, 4, loading=loading, replicas=1)
        return {candidate.setup.name: candidate for candidate in made.candidates}

    default = plan()
    row_bytes = 4 * SHAPE.num_features
    for name, share in (("split", 0.25), ("data", 1.0)):  # all rows fit
        uncached = plan(device_cache_bytes=0)[name]
        cached_bytes = default[name].memory.own - uncached.memory.own
        assert cached_bytes == pytest.approx(share * store.num_vertices * row_bytes, rel=0.1)
        assert default[name].step.stages.load < uncached.step.stages.load
        on_device = plan(samples_on_device=True, device_cache_bytes=0, prefetch=2)[name]
        graph_bytes = 8 * (store.num_vertices + 1) + store.num_edges * store.graph.indices.itemsize
        tables = 4 * store.num_vertices
        held = on_device.memory.own - uncached.memory.own
        assert held == pytest.approx(share * (graph_bytes + tables), rel=0.1)
        assert on_device.step.stages.sample < uncached.step.stages.sample
        few = plan(prefetch=0, device_cache_bytes=0)[name]
        assert few.memory.own < uncached.memory.own and few.step.wall_s > uncached.step.wall_s
    with pytest.raises(InputError, match="hosts: expected a divisor of 4 ranks .got 3"):
        make_plan(store, workload, SHAPE, QUICK, 4, hosts=3)


def test_ranks_of_one_host_read_rows_in_place(store: Store, workload: Workload, tmp_path: Path) -> None:
    host = replace(QUICK, cores=8)

    def plan(**options: Any) -> dict[str, Candidate]:
        made = make_plan(store, workload, SHAPE, host, 4, **options)
        return {candidate.setup.name: candidate for candidate in made.candidates}

    in_place = plan()
    ahead = plan(loading=Loading(prefetch=8))["split"]  # ten mini-batches in memory instead of two
    assert ahead.memory.own > in_place["split"].memory.own and ahead.step.wall_s == in_place["split"].step.wall_s
    far = plan(hosts=4)
    for name in ("split", "hybrid(1)", "data_cached"):
        ours, theirs = in_place[name].step, far[name].step
        assert ours.stages.exchange_features == 0 < theirs.stages.exchange_features, name
        assert ours.counts.rows_loaded == sum(rank.sources[0] for rank in ours.counts.ranks), name
        assert ours.counts.rows_loaded > theirs.counts.rows_loaded, name
        moved = sum(rank.rows_sent[0] for rank in theirs.counts.ranks)
        assert ours.counts.rows_sent == pytest.approx(theirs.counts.rows_sent - moved), name
    assert plan(hosts=2)["split"].step.stages.exchange_features > 0
    assert plan(hosts=2)["split x 2"].step.stages.exchange_features == 0  # each replica is on one host
    for loading in (Loading(on_disk=True), Loading(cache_bytes=10_000), Loading(copies=True)):
        assert plan(loading=loading)["split"].step.stages.exchange_features > 0, loading
    scaled = write_with_features(store, tmp_path / "int8.gsplit", "int8")
    best = make_plan(scaled, Workload.of_store(scaled, "train", [4, 4], 128), SHAPE, host, 4)
    assert not any(each.step.counts.exchanges_inputs for each in best.candidates)
    on_devices = make_plan(store, workload, SHAPE, QUICK, 4)
    assert all(each.step.counts.exchanges_inputs for each in on_devices.candidates)


def test_a_slow_network_makes_replicas_and_a_fast_one_splits_over_hosts(store: Store, workload: Workload) -> None:
    """Two hosts with two ranks each, of a machine on which input rows are dear to read twice."""
    ranks_per_host = 2
    host = replace(QUICK, cores=2, load_bytes_per_s=2e8, exchange_bytes_per_s=5e9, reduce_bytes_per_s=5e9)

    def best(gigabits: float) -> Plan:
        network = replace(host, between_bytes_per_s=gigabits * 1e9 / 8 / ranks_per_host)
        return make_plan(store, workload, SHAPE, network, 4, hosts=2, strategies=("split",))

    assert best(1).best.setup.name == "split x 2"
    assert best(25).best.setup.name == "split"
    steps = {candidate.setup.name: candidate.step for candidate in best(1).candidates}
    assert steps["split"].stages.shuffle > 10 * steps["split x 2"].stages.shuffle


def test_rows_between_hosts_are_those_that_the_partition_counted(store: Store, workload: Workload) -> None:
    slow = replace(QUICK, between_bytes_per_s=1e3)
    plan = make_plan(store, workload, SHAPE, slow, 4, hosts=2, strategies=("split",), replicas=1)
    split = next(candidate.step for candidate in plan.candidates if candidate.setup.name == "split")
    assert store.manifest.part_statistics is not None
    shares = [forecast(store.manifest.part_statistics, store.part_boundaries, n).cross_edge_share for n in (2, 4)]
    rank = split.counts.ranks[0]
    ids = 8 * (rank.ids_sent + rank.ids_received) / 2
    assert 0 < shares[0] < shares[1]
    assert split.ranks[0].exchange_ids == pytest.approx(shares[0] / shares[1] * ids / 1e3)


def test_layers_and_fanouts_must_agree(store: Store, workload: Workload) -> None:
    with pytest.raises(InputError, match="2 fanouts and 3 layers"):
        make_plan(store, workload, replace(SHAPE, num_layers=3), GPU, 2)


def test_a_store_in_one_part_is_said_to_be(tmp_path: Path) -> None:
    plain = build_store(synthetic_source(PlantedGraph(300, 2000, num_features=4, num_classes=2)), tmp_path / "g.gsplit")
    workload = Workload.of_store(plain, "train", [2], 32)
    plan = make_plan(plain, workload, PlannedModel("sage", 4, 8, 2, 1), GPU, 2, steps=99)
    assert any("not partitioned" in note for note in plan.notes)
