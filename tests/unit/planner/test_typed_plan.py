"""Plans of heterogeneous graphs: bytes use the width of each type, and "auto" takes targets of a type."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from typed_graphs import CITES, WRITES, academic

import gsplit
from gsplit.distributed.comm.comm import SoloComm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError
from gsplit.graph.ownership import own_parts
from gsplit.partitioning.presample import Workload
from gsplit.planner import auto, plan
from gsplit.planner.counts import count_strategies
from gsplit.planner.disk import count_reads
from gsplit.planner.estimate import estimate_step
from gsplit.planner.hardware import PRESETS
from gsplit.planner.placement import Loading, Placement
from gsplit.planner.plan import make_plan, planned_types
from gsplit.planner.shapes import PlannedModel, PlannedTypes
from gsplit.run.choices import plan_strategy
from gsplit.run.config import TrainSettings
from gsplit.run.results import ModelShape
from gsplit.store.reader import Store

HOST = replace(PRESETS["v100-nvlink"], name="host", cores=2)
FEATURES = ("venue/x", "paper/x", "paper/extra")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("typed")
    plain = academic().build(folder / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 8, "solver": "random", "objective": "random", "epochs": 1}
    return gsplit.partition(plain, folder / "p.gsplit", 4, [3, 2], "paper/train", **options)


@pytest.fixture(scope="module")
def workload(store: Store) -> Workload:
    return Workload.of_store(store, "paper/train", [3, 2], 8)


def _shape(store: Store) -> PlannedModel:
    return PlannedModel(hidden=16, num_classes=4, num_layers=2, types=planned_types(store, FEATURES))


def test_widths_and_weights_are_those_of_the_types(store: Store) -> None:
    shape = _shape(store)
    assert shape.types == PlannedTypes(widths=(0, 3, 7), ends=((0, 2), (2, 2), (1, 2), (2, 0)))
    relations = [(0, 7), (7, 7), (3, 7), (7, 0)]
    assert shape.num_parameters == sum(16 * (a + b) for a, b in relations) + len(relations) * 2 * 16 * 4


def test_bytes_are_those_of_the_rows_of_every_type(store: Store, workload: Workload) -> None:
    """Papers have 5 float32 and 2 float64, venues 3 float32, authors nothing."""
    ownership = own_parts(store.part_boundaries, 2, store.part_loads)
    (counts,) = count_strategies(workload, ownership, ["split"], steps=2, featured=["venue", "paper"])
    sizes = (0.0, 12.0, 36.0)
    hardware = replace(HOST, load_s=0.0, row_overhead_bytes=0.0, collective_s=0.0)
    step = estimate_step(counts, _shape(store), hardware, Placement(sizes))
    for rank, seconds in zip(counts.ranks, step.ranks, strict=True):
        assert rank.types is not None
        assert rank.types.rows_loaded[0] == 0 < rank.types.rows_loaded[2]
        loaded = float(np.dot(rank.types.rows_loaded, sizes))
        assert seconds.load == pytest.approx(loaded / hardware.load_bytes_per_s)
        moved = np.dot(np.add(rank.types.rows_sent, rank.types.rows_received), (0, 3, 7)) * 4 / 2
        assert seconds.exchange_features == pytest.approx(moved / hardware.exchange_bytes_per_s)
    one = count_reads(workload, (0, 1 << 20, 0), steps=2)
    assert one.reads == 0  # venues have no edges
    papers = count_reads(workload, (0, 0, 4096), steps=2)
    (alone,) = count_strategies(
        workload, own_parts(store.part_boundaries, 1, None), ["split"], steps=2, featured=["paper"]
    )
    assert papers.num_bytes >= 4096 * alone.rows_loaded > 0


def test_a_plan_knows_caches_files_and_memory(store: Store, workload: Workload) -> None:
    made = make_plan(store, workload, _shape(store), HOST, 2, features=FEATURES)
    names = {candidate.setup.name for candidate in made.candidates}
    assert names == {"split", "hybrid(1)", "data_cached", "data_cached(strided)", "data", "data(owner)", "one process"}
    every = {candidate.setup.name: candidate for candidate in made.candidates}
    graph_bytes = 8 * (store.num_vertices + 1) + store.num_edges * store.graph.indices.itemsize
    assert every["one process"].memory.mapped == graph_bytes + 50 * 36 + 4 * 12
    slow = replace(HOST, disk_reads_per_s=10.0)

    def load_s(cache_bytes: int) -> float:
        loading = Loading(on_disk=True, cache_bytes=cache_bytes)
        found = make_plan(
            store, workload, _shape(store), slow, 2, features=FEATURES, strategies=("split",), loading=loading
        )
        return next(one.step.stages.load for one in found.candidates if one.setup.name == "split")

    assert load_s(1 << 20) < load_s(400) < load_s(0)


def _two_ranks() -> Mesh:
    world, inner = SoloComm(), SoloComm()
    world.size = inner.size = 2
    return Mesh(torch.device("cpu"), inner, inner, inner, world, world, world)


def test_auto_takes_targets_of_a_type(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "known_machine", lambda: HOST)
    planned: list[Workload] = []
    choose = plan.choose

    def note(store: Store, workload: Workload, *args: Any, **options: Any) -> Any:
        planned.append(workload)
        return choose(store, workload, *args, **options)

    monkeypatch.setattr(auto, "choose", note)
    fanouts = {relation: [2, 0] if relation == CITES else [3, -1] for relation in store.metadata()[1]}
    options: dict[str, Any] = {"batch_size": 8, "strategy": "auto", "mesh": _two_ranks()}
    for targets in ("paper/train", ("paper", "train"), ("paper", None), "paper"):
        loader = gsplit.NeighborLoader(store, fanouts, targets, **options)
        assert loader.plan.strategy.name in plan._FOR_ANY_MODEL
    assert [workload.targets.size for workload in planned] == [25, 25, 50, 50]
    assert planned[0].fanouts == ((3, 2, 3, 3), (-1, 0, -1, -1))
    assert np.array_equal(np.sort(planned[2].targets), np.flatnonzero(store.types.of_host(np.arange(84)) == 2))  # type: ignore[union-attr]
    settings = TrainSettings(targets="paper/train", features="x,extra", fanout=[3, 2], hidden=16, strategy="auto")
    assert plan_strategy(settings, ModelShape(0, 4), store, _two_ranks()).strategy != "auto"
    assert planned[-1].targets.size == 25
    with pytest.raises(InputError, match="expected a store on disk and the name of stored targets"):
        gsplit.NeighborLoader(store, [3], ("paper", torch.arange(3)), **options)
    with pytest.raises(InputError, match="strategy: expected an option that is built .*strategy=auto for pairs"):
        gsplit.LinkNeighborLoader(store, [3], (WRITES, torch.tensor([[0], [1]])), **options)
