"""The loader: PyG's names, positions instead of state, and a clear no to what it cannot do."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import gsplit
from gsplit.distributed.comm.comm import Call, SoloComm
from gsplit.distributed.comm.mesh import Mesh, init, solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.loading.batch_loader import _note_unused
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.partitioning.partition import partition
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import open_draw
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.manifest import Manifest
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard
from gsplit.store.statistics import Statistics
from gsplit.store.writer import StoreWriter


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    graph = PlantedGraph(2000, 20_000, num_features=8, num_classes=4)
    return build_store(synthetic_source(graph), tmp_path_factory.mktemp("loader") / "g.gsplit")


def _loader(store: Any, **more: Any) -> NeighborLoader:
    options: dict[str, Any] = {"num_neighbors": [5, 3], "input_nodes": "train", "batch_size": 100} | more
    return NeighborLoader(store, **options)


def _same(one: Any, two: Any) -> bool:
    return (
        torch.equal(one.x, two.x)
        and torch.equal(one.n_id, two.n_id)
        and all(torch.equal(a.src_rows, b.src_rows) for a, b in zip(one.blocks, two.blocks, strict=True))
    )


def test_a_batch_holds_what_it_says(store: Store) -> None:
    loader = _loader(store)
    targets = store.stored_array("targets/train")
    assert len(loader) == -(-targets.size // 100)
    seen = []
    for batch in loader:
        size = batch.batch_size
        assert size == batch.global_batch_size
        assert torch.equal(batch.x, torch.from_numpy(store.stored_array("features/x")[batch.n_id.numpy()]))
        assert torch.equal(batch.y, torch.from_numpy(store.stored_array("y")[batch.n_id[:size].numpy()]))
        assert [b.num_dst for b in batch.blocks] == [batch.blocks[1].num_src, size]
        h_mixed, h_dst = batch.shuffle(0, batch.x)
        assert h_mixed is batch.x
        assert torch.equal(h_dst, batch.x[: batch.blocks[0].num_dst])
        seen += batch.n_id[:size].tolist()
    assert sorted(seen) == targets.tolist()
    assert seen != targets.tolist()


def test_any_step_can_be_made_without_the_ones_before(store: Store) -> None:
    loader = _loader(store)
    epochs = [list(loader) for _ in range(2)]
    assert not _same(epochs[0][0], epochs[1][0])
    fresh = _loader(store)
    assert _same(fresh.make_batch(1, 3), epochs[1][3])
    fresh.set_epoch(1)
    assert all(_same(a, b) for a, b in zip(fresh, epochs[1], strict=True))
    other = _loader(store, seed=1).make_batch(0, 0)
    assert not _same(other, epochs[0][0])


def test_resume_is_exact_by_epoch_and_step_alone(store: Store) -> None:
    loader = _loader(store)
    list(loader)
    stream = iter(loader)
    _ = [next(stream) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {"epoch": 1, "step": 3}
    rest = list(stream)
    resumed = _loader(store)
    resumed.load_state_dict(state)
    again = list(resumed)
    assert len(again) == len(rest)
    assert all(_same(a, b) for a, b in zip(again, rest, strict=True))
    assert _same(next(iter(resumed)), next(iter(loader)))  # then both go on with the next epoch
    with pytest.raises(gsplit.InputError, match="state: expected epoch and step"):
        loader.load_state_dict({"epoch": 1})


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(store: Store) -> None:
    loader = _loader(store)
    list(loader)
    resumed = _loader(store)
    resumed.load_state_dict(loader.state_dict())
    assert [b.key for b in resumed] == [b.key for b in loader]
    for state in ({"epoch": 0, "step": -1}, {"epoch": 0, "step": 10}, {"epoch": -1, "step": 0}):
        with pytest.raises(gsplit.InputError, match=r"a step in 0..9"):
            loader.load_state_dict(state)
    for epoch, step in ((0, 9), (0, -1), (-1, 0)):
        with pytest.raises(gsplit.InputError, match=r"make_batch: expected an epoch from 0 and a step in 0..8"):
            loader.make_batch(epoch, step)
    one: Any = np.int64(1)
    assert _loader(store, seed=one).make_batch(one, one).key.step == 1


def test_iterators_do_not_disturb_each_other_silently(store: Store) -> None:
    loader = _loader(store)
    first = iter(loader)
    assert next(first).key.epoch == 0
    second = iter(loader)
    assert [next(second).key.step for _ in range(2)] == [0, 1]
    with pytest.raises(gsplit.InputError, match="this iterator: expected to be the loader's newest"):
        next(first)
    steps = []
    for batch in second:
        steps.append(batch.key.step)
        loader.set_epoch(7)  # for the next loop, not for this one
    assert steps == list(range(2, len(loader)))
    assert loader.state_dict() == {"epoch": 7, "step": 0}
    assert [batch.key.epoch for batch in loader] == [7] * 9


def test_an_abandoned_step_has_a_record_of_its_own(store: Store) -> None:
    loader = _loader(store)
    for _ in loader:
        break
    list(loader)
    assert [(r.epoch, r.step) for r in loader.telemetry.records] == [(0, 0), *((1, s) for s in range(9))]
    assert {r.counts["targets"] for r in list(loader.telemetry.records)[:-1]} == {100}


def test_gradients_of_stored_features_are_refused(store: Store) -> None:
    batch = _loader(store).make_batch(0, 0)
    batch.x.requires_grad_()
    for use in (lambda: batch.shuffle(0, batch.x), lambda: batch.mean(torch.zeros(100))):
        with pytest.raises(gsplit.InputError, match=r"batch.x: expected requires_grad=False"):
            use()


def test_target_lists_masks_and_everybody(store: Store) -> None:
    wanted = torch.tensor([5, 1999, 3, 70])
    mask = torch.zeros(2000, dtype=torch.bool)
    mask[wanted] = True
    by_list, by_mask = _loader(store, input_nodes=wanted, batch_size=3), _loader(store, input_nodes=mask, batch_size=3)
    assert [b.n_id[: b.batch_size].tolist() for b in by_list] == [b.n_id[: b.batch_size].tolist() for b in by_mask]
    assert len(_loader(store, input_nodes=wanted, batch_size=3, drop_last=True)) == 1
    plain = _loader(store, input_nodes=wanted, batch_size=3, shuffle=False)
    assert [b.n_id[: b.batch_size].tolist() for b in plain] == [[3, 5, 70], [1999]]
    assert _loader(store, input_nodes=None).num_targets == 2000
    assert len(_loader(store, input_nodes=torch.empty(0, dtype=torch.int64))) == 0


def test_original_ids_are_looked_up_when_they_are_first_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.randint(0, 4, (2000,), generator=torch.Generator().manual_seed(0))
    loader = _loader(gsplit.to_pyg(store), partition=parts)
    asked: list[int] = []
    convert = LocalGraph.to_original_ids

    def counting(graph: LocalGraph, ids: Tensor) -> Tensor:
        asked.append(ids.numel())
        return convert(graph, ids)

    monkeypatch.setattr(LocalGraph, "to_original_ids", counting)
    batch = loader.make_batch(0, 0)
    assert asked == []
    assert torch.equal(batch.n_id, _loader(store).make_batch(0, 0).n_id) and not torch.equal(
        batch.n_id, batch.input_ids
    )
    assert batch.n_id is batch.frontier(1).names and asked[:1] == [batch.input_ids.numel()]


def test_pyg_data_with_a_partition(store: Store) -> None:
    data = gsplit.to_pyg(store)
    parts = torch.randint(0, 4, (2000,), generator=torch.Generator().manual_seed(0))
    from_store, from_data = _loader(store), _loader(data, partition=parts)
    for one, two in zip(from_store, from_data, strict=True):
        assert torch.equal(one.n_id, two.n_id)  # the same mini-batch, in the same rows, in original ids
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
    with pytest.raises(gsplit.InputError, match=r"partition: expected integers of shape \[2000\]"):
        _loader(data, partition=parts[:5])
    with pytest.raises(gsplit.InputError, match="partition: expected None for a store"):
        _loader(store, partition=parts)
    wrong = Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0], [7]]))
    with pytest.raises(gsplit.InputError, match=r"edge_index: expected ids in 0..1"):
        _loader(wrong, input_nodes=None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size: expected a positive number"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"strategy": "magic"}, "strategy: expected split, data"),
        (
            {"sampler": "walk"},
            "sampler: expected 'uniform' or 'labor', which are built in, .*got 'walk'.*add-a-sampler",
        ),
        ({"sampler": "labor-*"}, "labor-. looks at all vertices of the layer, .*use sampler='labor'"),
        ({"sampler": "labor", "replace": True}, "replace: expected the uniform sampler without weights .got .*labor"),
        ({"weight_attr": "z"}, "weight_attr: expected the name of a stored per-edge array .got 'z'; stored are none"),
        (
            {"sampler": lambda part: None, "weight_attr": "w"},
            "sampler: expected a built-in sampler for these options .got a function and weight_attr w",
        ),
        ({"num_workers": 4}, "option num_workers.*leave it out"),
        ({"nonsense": 1}, "option nonsense.*see the signature"),
        ({"num_neighbors": [0]}, "num_neighbors: expected"),
        ({"input_nodes": "holdout"}, "targets/holdout"),
        (
            {"input_nodes": torch.tensor([1, 1])},
            "input_nodes: expected every vertex once .got 1 of them more than once, such as 1",
        ),
        ({"input_nodes": torch.tensor([2000])}, "input_nodes: expected ids in 0..1999"),
        ({"features": "z"}, "features/z"),
        ({"seed": 1.5}, "seed: expected 0 to"),
        ({"input_nodes": torch.ones(10, dtype=torch.bool)}, "a bool mask of 2000 .got torch.bool"),
        ({"input_nodes": torch.tensor([1.7, 2.9])}, "1-d tensor of integer ids"),
        ({"input_nodes": [1, 2]}, "1-d tensor of integer ids.*got list"),
        ({"ownership": Ownership((0, 5, 2000))}, "ownership: expected 1 ranges over 2000 vertices"),
        ({"ownership": Ownership((0, 5))}, "ownership: expected 1 ranges"),
    ],
)
def test_what_it_cannot_do_is_refused(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gsplit.InputError, match=message):
        _loader(store, **options)


def test_wrong_use_of_a_batch_is_refused(store: Store) -> None:
    batch = _loader(store).make_batch(0, 0)
    handle: Any = batch.edge_index
    uses: list[tuple[Any, str]] = [
        (lambda: batch.mean(torch.zeros(batch.batch_size + 1)), r"values: expected shape \[100\]"),
        (lambda: batch.sum(torch.zeros(batch.batch_size, 2)), r"values: expected shape \[100\]"),
        (lambda: batch.shuffle(2, batch.x), "layer: expected 0 to 1"),
        (lambda: batch.shuffle(0, batch.x[1:]), r"h at layer 0: expected .*row-wise encoder"),
        (
            lambda: batch.edge_weight,
            r"batch.edge_weight: expected a graph with stored.*no per-edge.*edge_weight=NAME",
        ),
        (lambda: batch.shuffle(1, batch.x), "h at layer 1: expected"),
        (lambda: torch.stack([handle, handle]), r"torch.stack: expected a tensor of edges"),
        (lambda: handle.size(0), r"batch.edge_index: expected no tensor operation .got .size"),
        (lambda: list(handle), r"batch.edge_index: expected no tensor operation.*one block per layer"),
        (lambda: handle[0], r"one block per layer"),
        (lambda: handle + 1, r"one block per layer"),
        (lambda: len(handle), r"one block per layer"),
        (lambda: batch.to("meta"), r"batch.to: expected the mesh's device, cpu"),
    ]
    for use, message in uses:
        with pytest.raises(gsplit.InputError, match=message):
            use()
    assert batch.edge_index.batch is batch
    assert batch.to("cpu").x.device.type == "cpu"


def test_mean_and_sum_are_over_the_whole_batch(store: Store) -> None:
    batch = _loader(store).make_batch(0, 0)
    values = torch.arange(100.0, requires_grad=True)
    mean = batch.mean(values)
    assert float(mean.detach()) == 49.5
    mean.backward()
    assert values.grad is not None
    assert torch.allclose(values.grad, torch.full((100,), 0.01))
    assert float(batch.sum(values.detach())) == 4950


def test_two_batches_live_at_once(store: Store) -> None:
    loader = _loader(store)
    one, two = loader.make_batch(0, 0), loader.make_batch(0, 1)
    before = one.x.clone()
    three = loader.make_batch(0, 2)
    assert torch.equal(one.x, before)
    assert len({b.x.data_ptr() for b in (one, two, three)}) == 3


def test_start_says_both_batch_sizes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gsplit")
    _loader(store)
    assert "global mini-batch of 100 targets over 1 rank(s), 100.0 per rank on average; 9 steps" in caplog.text


def test_a_graph_that_is_not_partitioned_is_pointed_out_on_several_ranks(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = _unanswered_mesh()
    object.__setattr__(mesh.world, "rank", 0)
    _loader(store, mesh=mesh)
    assert "the graph is not partitioned" in caplog.text and "gsplit partition" in caplog.text
    caplog.clear()
    _loader(store)
    assert caplog.text == ""


def test_telemetry_is_one_line_per_step(store: Store, tmp_path: Path) -> None:
    loader = _loader(store, telemetry=tmp_path / "rank0.jsonl")
    edges = [sum(block.num_edges for block in batch.blocks) for batch in loader]
    loader.telemetry.close()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, step) for step in range(len(loader))]
    assert [line["counts"]["edges"] for line in lines] == edges
    assert sum(line["counts"]["targets"] for line in lines) == loader.num_targets
    for line in lines:
        assert {"sample", "split", "exchange_ids", "load_features"} <= line["seconds"].keys()
        assert line["peaks"]["batch_bytes"] > 0


@pytest.mark.parametrize("prefetch, thread", [(0, "MainThread"), (2, "gsplit-loader")])
def test_spans_of_loading_are_those_of_the_thread_that_loads(store: Store, prefetch: int, thread: str) -> None:
    loader = _loader(store, prefetch=prefetch)
    for _ in loader:
        pass
    assert len(loader.telemetry.records) == len(loader)
    for record in loader.telemetry.records:
        threads = {span.name: span.thread for span in record.spans}
        assert threads["sample"] == threads["load_features"] == thread
        assert threads.get("wait_for_batch") == (None if prefetch == 0 else "MainThread")
        assert all(span.start_ns <= span.end_ns for span in record.spans)


class UnansweredComm(SoloComm):
    """One of four ranks whose peers ask for nothing and answer with zeros: enough to see what a rank keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 1, 4

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) * self.size

    def all_to_all(self, call: Call, out: Any, rows: Any, out_counts: Any, row_counts: Any) -> Any:
        out.zero_()
        return super().all_to_all(call, out[:0], rows[:0], (0,), (0,))

    def gather_text(self, call: Call, text: str) -> list[str]:
        return [text] * self.size


def _unanswered_mesh() -> Mesh:
    shuffles, loading, gradients, world = (UnansweredComm() for _ in range(4))
    return Mesh(torch.device("cpu"), shuffles, loading, loading, gradients, world, world)


def test_nothing_of_the_size_of_the_graph_on_a_rank(tmp_path: Path) -> None:
    """50 M vertices, one of 4 ranks: telemetry shows no array above the range's share, the batch apart (law 6)."""
    n, e, num_targets = 50_000_000, 4_000_000, 5_000_000
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "g.gsplit") as writer:
        indptr = writer.place("indptr", "int64", (n + 1,))
        indptr[n // 4 + 1 : n // 4 + e] = np.arange(
            1, e
        )  # vertices of rank 1 have one in-edge each, the first e of them
        indptr[n // 4 + e :] = e
        writer.place("indices", "int32", (e,))[:] = rng.integers(0, n, e)
        writer.write("targets/train", "int64", np.arange(0, n, n // num_targets))
        writer.place("features/x", "float32", (n, 1))
        counts = {"num_self_loops": 0, "num_duplicate_edges": 0, "num_isolated_vertices": 0, "max_in_degree": 1}
        manifest = Manifest(
            num_vertices=n,
            num_edges=e,
            vertex_range=(0, n),
            part_boundaries=[0, n],
            arrays=writer.finish_arrays(),
            statistics=Statistics(**counts, in_degree_histogram=[]),
            provenance=[],
        )
        writer.commit(manifest)
    mesh = _unanswered_mesh()
    loader = _loader(gsplit.open(tmp_path / "g.gsplit"), num_neighbors=[10] * 3, batch_size=4096, mesh=mesh)
    for batch, _ in zip(loader, range(3), strict=False):
        assert batch.batch_size > 500
    assert len(loader.telemetry.records) == 4  # the fourth was made and left
    for record in loader.telemetry.records:
        share, batch_share = n // 4, 8 * 4096 * (1 + 10 + 100 + 1000)
        assert record.peaks["largest_range_array_bytes"] <= 4 * share  # row_of, int32 per vertex of the range
        assert record.peaks["targets_bytes"] <= 4 * 8 * (num_targets // 4 + 1)
        assert record.peaks["sampler_bytes"] <= 4 * share + batch_share
        assert record.peaks["largest_batch_array_bytes"] <= batch_share
    made: Any = loader._makers[0].strategy
    held = vars(made._own) | vars(loader._graph.targets)
    assert max(a.nbytes for a in held.values() if isinstance(a, np.ndarray)) <= 4 * share + batch_share


def test_integers_of_numpy_are_numbers(store: Store) -> None:
    plain = _loader(store, num_neighbors=[3, 2], batch_size=10, seed=5)
    made = _loader(
        store, num_neighbors=[np.int64(3), np.int32(2)], batch_size=np.int64(10), seed=np.int64(5), prefetch=np.int64(0)
    )
    assert made.description == plain.description
    assert torch.equal(made.make_batch(0, 0).n_id, plain.make_batch(0, 0).n_id)
    with pytest.raises(gsplit.InputError, match=r"batch_size: expected a positive number .got 0"):
        _loader(store, batch_size=np.int64(0))


def test_a_plan_can_be_printed_and_described(store: Store) -> None:
    plan = _loader(store, num_neighbors=[3, 2], batch_size=10, cache=0).plan
    assert "batch_size: 10" in str(plan).splitlines() and "strategy: split" in str(plan).splitlines()
    described = {"graph", "num_vertices", "input_nodes", "num_targets", "num_neighbors", "batch_size", "shuffle"}
    described |= {"drop_last", "seed", "arrays"}
    assert described <= set(plan.description) and plan.description["num_neighbors"] == "[3, 2]"
    assert set(plan.compared) - set(plan.description) == {
        "strategy",
        "prefetch",
        "sampling_threads",
        "copies",
        "boundaries",
    }


def test_int8_features_are_compared_with_their_scales(tmp_path: Path) -> None:
    """A resumed run reads other features if only these differ."""
    data = Data(x=torch.randn(20, 4), edge_index=torch.arange(20).repeat(2, 1), y=torch.zeros(20, dtype=torch.int64))
    stores = []
    for name in ("one", "twice"):
        plain = gsplit.from_pyg(data, tmp_path / f"{name}.gsplit")
        stores.append(write_with_features(plain, tmp_path / f"{name}-int8.gsplit", "int8"))
        data.x = data.x * 2
    one, twice = (NeighborLoader(store, [2], torch.arange(20), batch_size=4).description for store in stores)
    assert one["store features/x"] == twice["store features/x"]
    assert {key for key in one if one[key] != twice[key]} == {"store scales/x"}


def test_the_sampler_is_described_unless_it_is_the_default(store: Store) -> None:
    assert "sampler" not in _loader(store).plan.description  # as in checkpoints of older versions
    described = _loader(store, sampler="labor", layer_dependency=True).plan.description
    assert described["sampler"] == "labor, layer_dependency"


def test_labor_needs_the_original_ids_of_all_vertices(store: Store, tmp_path: Path) -> None:
    plain = write_shard(store, tmp_path / "plain.gsplit", 0, 1000)
    parts = partition(store, tmp_path / "p.gsplit", 2, [3], batch_size=100, solver="restream", epochs=1)
    shard = write_shard(parts, tmp_path / "shard.gsplit", 0, parts.part_boundaries[1])
    labor = DrawOptions(sampler="labor")
    assert open_draw(labor, plain, plain.graph).source_ids.size == 0  # its ids are original
    assert open_draw(labor, parts, parts.graph).source_ids.size == 2000
    message = (
        rf"sampler='labor': expected .* of all vertices, .*got a shard .* 0..{parts.part_boundaries[1] - 1} of 2000"
    )
    with pytest.raises(gsplit.InputError, match=message):
        open_draw(labor, shard, shard.graph)
    assert open_draw(DrawOptions(replace=True), shard, shard.graph).source_ids.size == 0


def test_labels_are_missed_when_asked_for(store: Store) -> None:
    data = gsplit.to_pyg(store)
    del data.y
    with pytest.raises(gsplit.InputError, match=r"batch.y: expected a graph with labels"):
        _ = _loader(data).make_batch(0, 0).y


def test_a_mesh_of_one_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (init("cpu").size, init("cpu").rank, solo_mesh().device.type) == (1, 0, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(gsplit.InputError, match="expected RANK beside WORLD_SIZE"):
        init("cpu")


def test_what_a_batch_does_not_carry_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    data = gsplit.to_pyg(store)
    data.edge_weight = torch.ones(data.num_edges)
    data.node_year = torch.zeros(2000, dtype=torch.int64)
    _note_unused.cache_clear()
    batch = _loader(data).make_batch(0, 0)
    _loader(data)
    assert caplog.text.count("not in the mini-batches: node_year") == 1  # once, for all loaders
    assert batch.has_edge_weight


def test_a_batch_says_what_it_is_in_a_line(store: Store) -> None:
    batch = _loader(store).make_batch(2, 3)
    rows = batch.x.size(0)
    assert repr(batch) == (f"Batch(epoch 2, step 3: 100 of 100 targets, 2 layers, x [{rows}, 8], split on rank 0 of 1)")
    assert batch.num_targets == batch.batch_size == 100


def test_a_mesh_left_out_under_torchrun_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(gsplit.InputError, match=r"NeighborLoader: expected the mesh of the 2 ranks .got mesh=None"):
        _loader(store)
    with pytest.raises(gsplit.InputError, match=r"gsplit.verify: expected the mesh of the 2 ranks .got mesh=None"):
        gsplit.verify(torch.nn.Linear(1, 1), store, [2], "train")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_older_iterator_is_refused_and_does_not_disturb_the_newest(store: Store, prefetch: int) -> None:
    loader = _loader(store, prefetch=prefetch)
    older, newest = iter(loader), iter(loader)
    next(newest)
    with pytest.raises(ValueError, match="this iterator: expected to be the loader's newest .got iterator 1 of 2"):
        next(older)
    assert next(newest).key.step == 1
    begun, newer = newest, iter(loader)
    next(newer)
    with pytest.raises(ValueError, match="iterator 2 of 3"):
        next(begun)
    assert next(newer).key.step == 1
    newer.close()  # type: ignore[attr-defined]
    assert loader._pipeline is None


def test_sampling_threads_need_batches_ahead_and_built_in_samplers_and_sources(store: Store) -> None:
    loader = _loader(store, prefetch=3, sampling_threads=np.int64(3))
    rows = SimpleNamespace(row_shape=(2,), dtype=torch.float32, read=lambda ids, out: None)
    assert (loader.prefetch, loader.sampling_threads) == (3, 3)
    with pytest.raises(ValueError, match="sampling_threads: expected a number of threads, from 1 .got 0"):
        _loader(store, prefetch=3, sampling_threads=0)
    with pytest.raises(ValueError, match="batches made ahead as threads .got sampling_threads=2 with prefetch=1"):
        _loader(store, prefetch=1, sampling_threads=2)
    with pytest.raises(ValueError, match=r"sampling_threads: expected stored features .got .* user-defined source"):
        _loader(store, prefetch=2, sampling_threads=2, features=rows)
    with pytest.raises(ValueError, match=r"expected a built-in sampler .got .* user-defined sampler"):
        _loader(store, prefetch=2, sampling_threads=2, sampler=lambda held: None)
    with pytest.raises(ValueError, match=r"expected mini-batches .* on the CPU .got .* sample_device=meta"):
        _loader(store, sampling_threads=2, mesh=solo_mesh("meta"))


def test_prefetch_is_a_number(store: Store) -> None:
    with pytest.raises(ValueError, match="prefetch: expected a number of batches, 0 for none .got -1"):
        _loader(store, prefetch=-1)
