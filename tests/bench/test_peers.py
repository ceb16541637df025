"""Peers compute what they should: with our sampler and our targets, plain PyG has the loss of our strategies."""

import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from peer_programs import cached_steps, p3_losses

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.partitioning.partition import partition
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit_bench.machine import (
    current_commit,
    describe_machine,
    forget_features,
    installed_versions,
    read_clocks,
)
from gsplit_bench.peers import dgl_ddp, pyg_ddp
from gsplit_bench.peers.ddp import stored_tensor
from gsplit_bench.ranks import run_ranks
from gsplit_bench.train_study import DEFAULT, Launch, Scenario
from gsplit_bench.train_systems import check_store, is_ours, make_system, touch_pages

NEEDS_DGL = pytest.mark.skipif(find_spec("dgl") is None, reason="needs DGL 1.1.3 (benchmarks/README.md)")
NEEDS_SPARSE = pytest.mark.skipif(find_spec("torch_sparse") is None, reason="needs torch-sparse (benchmarks/README.md)")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    planted = PlantedGraph(600, 5000, num_communities=4, num_features=8, num_classes=4)
    return build_store(synthetic_source(planted), tmp_path_factory.mktemp("peers") / "g.gsplit")


def _scenario(store: Store, model: str, fanout: tuple[int, ...] = (4, 4)) -> Scenario:
    """All targets in one mini-batch: then every system has the same."""
    size = int(store.stored_array("targets/train").size)
    study = replace(DEFAULT, models=(model,), hidden=(16,), fanouts=(fanout,), batch_sizes=(size,))
    return study.scenarios([str(store.path)], Launch(1, "tuned"))[0]


@pytest.mark.parametrize("model", ["sage", "gin", "gat"])
def test_plain_pyg_with_our_sampler_trains_like_our_strategies(model: str, store: Store) -> None:
    scenario = _scenario(store, model)
    ours, theirs = (make_system(name, scenario, store, solo_mesh()) for name in ("split", "pyg_our_sampler"))
    for epoch in range(2):  # the second loss is that of weights that both have trained
        a, b = ours.train_step(epoch, 0), theirs.train_step(epoch, 0)
        assert a.values["loss"] == pytest.approx(b.values["loss"], rel=1e-4)
        for name in ("targets", "edges"):
            assert a.counts[name] == b.counts[name] > 0
        in_place = a.counts.get("rows_in_place", 0)  # by layers of ours that read input rows where they lie
        assert in_place + a.counts["rows_loaded"] == b.counts["rows_loaded"] > 0
        assert (in_place > 0) == (model != "gat")
        assert b.seconds.keys() == {"sample", "load_features", "forward", "backward", "optimizer"}
        assert b.seconds.keys() <= a.seconds.keys()
    assert theirs.note == ours.note == ""


@pytest.mark.parametrize(
    "name", ["pyg_our_sampler", pytest.param("pyg", marks=NEEDS_SPARSE), pytest.param("dgl", marks=NEEDS_DGL)]
)
def test_gcn_of_peers_is_normalised_by_the_sample_and_they_say_so(name: str, store: Store) -> None:
    """One layer on all in-edges: the same edges, other weights."""
    scenario = _scenario(store, "gcn", (-1,))
    first = make_system("split", scenario, store, solo_mesh()).train_step(0, 0)
    peer = make_system(name, scenario, store, solo_mesh())
    steps = [peer.train_step(epoch, 0) for epoch in range(20)]
    assert "degrees of the" in peer.note
    assert steps[0].counts["edges"] == first.counts["edges"]
    assert steps[-1].values["loss"] < steps[0].values["loss"]


@pytest.mark.parametrize("model", ["sage", "gat"])
def test_push_pull_on_ranks_trains_like_one_process_and_like_pyg(model: str, store: Store) -> None:
    scenario = replace(_scenario(store, model, (4, 3, 3)), batch_size=23)
    alone, whole = p3_losses(solo_mesh(), str(store.path), scenario)
    assert max(alone) - min(alone) > 1e-3
    for losses, counts in run_ranks(p3_losses, 2, str(store.path), scenario):
        assert losses == pytest.approx(alone, rel=0, abs=1e-9)
        assert counts["rows_loaded"] == whole["rows_loaded"]  # the union, of which each rank has its columns
        assert counts["bytes_loaded"] == whole["bytes_loaded"] / 2
        assert counts["rows_sent"] > 0
    ours, theirs = (make_system(name, scenario, store, solo_mesh()) for name in ("p3", "pyg_our_sampler"))
    for epoch in range(3):
        a, b = ours.train_step(epoch, 0), theirs.train_step(epoch, 0)
        assert a.values["loss"] == pytest.approx(b.values["loss"], rel=1e-4)
        assert a.counts["edges"] == b.counts["edges"]


def test_push_pull_refuses_what_it_has_no_layers_for(store: Store) -> None:
    with pytest.raises(gsplit.InputError, match="system p3: expected sage or gat.*got gcn"):
        make_system("p3", _scenario(store, "gcn"), store, solo_mesh())


def test_quivers_cache_has_the_rows_of_all_ranks_and_its_misses_are_redundant(store: Store, tmp_path: Path) -> None:
    parted = partition(store, tmp_path / "parted.gsplit", 2, [4, 4], batch_size=32)
    scenario = replace(_scenario(store, "sage"), batch_size=32, features="disk", cache=0.1)
    losses, missed = {}, {}
    for name in ("split", "quiver", "data"):
        found = run_ranks(cached_steps, 2, str(parted.path), scenario, name)
        losses[name] = found[0][0]
        missed[name] = sum(rows for _, rows in found)
    for found_losses in losses.values():
        assert found_losses == pytest.approx(losses["quiver"], rel=1e-5)
    assert 0 < missed["split"] < missed["quiver"] < missed["data"]
    whole = replace(scenario, cache=0.5)  # of two ranks: all rows
    assert sum(rows for _, rows in run_ranks(cached_steps, 2, str(parted.path), whole, "quiver")) == 0
    with pytest.raises(gsplit.InputError, match="system quiver: expected features on disk.*got features in memory"):
        make_system("quiver", _scenario(store, "sage"), store, solo_mesh())


@NEEDS_DGL
@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat"])
def test_dgl_draws_and_computes_the_same_amount(model: str, store: Store) -> None:
    scenario = _scenario(store, model, (-1, -1))
    ours, theirs = (make_system(name, scenario, store, solo_mesh()) for name in ("split", "dgl"))
    first = ours.train_step(0, 0)
    losses = [theirs.train_step(epoch, 0) for epoch in range(20)]
    assert losses[0].counts["edges"] == first.counts["edges"]
    assert losses[0].counts["rows_loaded"] == first.counts["rows_loaded"] + first.counts.get("rows_in_place", 0)
    assert losses[-1].values["loss"] < losses[0].values["loss"]
    if model == "gin":  # the same weights
        assert losses[0].values["loss"] == pytest.approx(first.values["loss"], rel=1e-4)
    with pytest.raises(gsplit.InputError, match=r"system dgl: expected sage, gcn, gin or gat \(got pna\)"):
        make_system("dgl", _scenario(store, "pna"), store, solo_mesh())


def test_without_dgl_it_is_said_how_to_get_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dgl_ddp, "find_spec", lambda name: None)
    with pytest.raises(gsplit.MissingDependencyError, match=r"system dgl: .* Fix: pip install --no-deps dgl==1.1.3"):
        make_system("dgl", _scenario(store, "sage"), store, solo_mesh())
    systems = ("dgl", "pyg", "p3", "hybrid(1)", "quiver")
    assert [name for name in systems if is_ours(name)] == ["hybrid(1)", "quiver"]


def test_without_torch_sparse_it_is_said_how_to_get_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyg_ddp, "find_spec", lambda name: None)
    message = (
        "system pyg: expected the package torch-sparse .* Fix: pip install torch-scatter torch-sparse .*, or measure"
    )
    with pytest.raises(gsplit.MissingDependencyError, match=message):
        make_system("pyg", _scenario(store, "sage"), store, solo_mesh())


@NEEDS_SPARSE
@pytest.mark.parametrize("model", ["sage", "gin", "gat"])
def test_pyg_with_its_own_sampler_and_all_neighbours_trains_like_our_strategies(model: str, store: Store) -> None:
    """With all in-edges a vertex has the same in every layer: the trimmed union is our blocks."""
    scenario = _scenario(store, model, (-1, -1))
    ours, theirs = (make_system(name, scenario, store, solo_mesh()) for name in ("split", "pyg"))
    for epoch in range(2):
        a, b = ours.train_step(epoch, 0), theirs.train_step(epoch, 0)
        assert a.values["loss"] == pytest.approx(b.values["loss"], rel=1e-4)
        assert a.counts["rows_loaded"] == b.counts["rows_loaded"]
    assert theirs.note.startswith("PyG samples with ")


def test_a_store_without_enough_targets_is_refused(store: Store, tmp_path: Path) -> None:
    scenario = _scenario(store, "sage")
    check_store(store, scenario)
    touch_pages(store)
    with pytest.raises(gsplit.InputError, match="targets for a mini-batch"):
        check_store(store, replace(scenario, batch_size=10_000))
    with pytest.raises(gsplit.InputError, match="a target for every rank"):
        check_store(store, replace(scenario, batch_size=2, ranks=4))
    bare = build_store(synthetic_source(PlantedGraph(50, 200, num_features=0)), tmp_path / "bare.gsplit")
    with pytest.raises(gsplit.InputError, match="features x and integer labels"):
        check_store(bare, replace(scenario, batch_size=1, ranks=1))


def test_rows_that_a_peer_has_mapped_are_forgotten(store: Store) -> None:
    def num_resident_kb() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        starts = [n for n, line in enumerate(lines) if line.endswith("g.gsplit/features/x.npy")]
        found = [next(line for line in lines[n:] if line.startswith("Rss:")) for n in starts]
        return sum(int(line.split()[1]) for line in found)

    stored_tensor(store, "features/x").sum()
    assert num_resident_kb() > 0
    forget_features(store, ["x"])
    assert num_resident_kb() == 0


def test_sleeping_is_blocked_and_computing_is_not() -> None:
    start = read_clocks()
    time.sleep(0.2)
    slept = read_clocks().since(start)
    assert slept.blocked_s > 0.15 and slept.cpu_s < 0.15 and slept.wall_s >= slept.blocked_s
    blocked = []
    for _ in range(3):  # the host of a virtual machine may take the core away
        start = read_clocks()
        while read_clocks().since(start).cpu_s < 0.2:
            sum(range(1000))
        blocked.append(read_clocks().since(start).blocked_s)
    assert min(blocked) < 0.1


def test_a_document_says_where_it_comes_from() -> None:
    commit = current_commit()
    assert commit is None or (int(commit.removesuffix("-changed"), 16) > 0 and len(commit.split("-")[0]) >= 7)
    assert installed_versions().keys() >= {"gsplit", "python", "torch", "torch_geometric", "numpy", "numba"}
    machine = describe_machine()
    assert int(machine["cores"]) >= 1 and int(machine["memory_bytes"]) > 1 << 28 and machine["processor"]
