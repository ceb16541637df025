"""What users read of a partitioned store is in original order, and joins with mini-batches and predictions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from graphs import sample_store
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.arrow import TableColumns
from gsplit.store.importers.pyg import memory_store
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard


@pytest.fixture
def plain(tmp_path: Path) -> Store:
    return sample_store(tmp_path / "g.gsplit")


@pytest.fixture
def parted(plain: Store, tmp_path: Path) -> Store:
    made = gsplit.partition(plain, tmp_path / "p.gsplit", 4, [3, 3], batch_size=64, epochs=1)
    assert not np.array_equal(made.original_ids(), np.arange(300))
    return made


def test_predictions_join_with_names_on_a_partitioned_store(tmp_path: Path) -> None:
    """The recipe of docs/import.md. Each vertex's feature is its own number, so a wrong join shows."""
    n, rng = 200, np.random.default_rng(1)
    names = [f"user-{i * 7919 % 1000:03d}" for i in range(n)]
    ends = rng.integers(0, n, (2, 900))
    pq.write_table(
        pa.table({"src": [names[s] for s in ends[0]], "dst": [names[d] for d in ends[1]]}), tmp_path / "e.pq"
    )
    numbers = dict(zip(names, rng.permutation(n).astype(float), strict=True))
    table = {"id": names, "x0": list(numbers.values()), "split": ["train"] * n}
    pq.write_table(pa.table(table), tmp_path / "v.pq")
    source = tables_source(tmp_path / "e.pq", tmp_path / "v.pq", columns=TableColumns(features=("x0",)))
    store = build_store(source, tmp_path / "g.gsplit")
    store = gsplit.partition(store, tmp_path / "p.gsplit", 4, [3], batch_size=50, epochs=1)
    model = GraphSAGE(1, 1, 1, root_weight=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.convs[0].lin_r.weight.fill_(1.0)  # the prediction is the vertex's own feature
    predictions = gsplit.infer(gsplit.parallelize(model, solo_mesh()), store)
    joined = dict(zip(store.vertex_names(), predictions[:, 0].tolist(), strict=True))
    assert joined == numbers
    some = store.array("targets/train")[::9]
    assert [numbers[name] for name in store.vertex_names(some)] == predictions[some, 0].tolist()


def test_arrays_and_rows_go_by_original_id(plain: Store, parted: Store) -> None:
    rng = np.random.default_rng(0)
    for name in ("y", "features/x"):
        want = plain.stored_array(name)
        assert plain.array(name) is want  # the map itself: nothing is copied
        assert np.array_equal(parted.array(name), want)
        assert not np.array_equal(parted.stored_array(name), want)
        for ids in ([], [7, 7, 0], rng.permutation(300), torch.tensor([299, 4])):
            assert np.array_equal(parted.rows(name, ids), want[np.asarray(ids, np.int64)])
            assert np.array_equal(plain.rows(name, ids), want[np.asarray(ids, np.int64)])
    for name in ("train", "test"):
        assert np.array_equal(parted.array(f"targets/{name}"), plain.array(f"targets/{name}"))
    heat = parted.array("hotness")
    assert np.array_equal(heat[parted.original_ids()], parted.stored_array("hotness"))
    assert parted.vertex_names() == plain.vertex_names() == [f"vertex-{i:05d}" for i in range(300)]
    assert parted.vertex_names([299, 0]) == plain.vertex_names([299, 0]) == ["vertex-00299", "vertex-00000"]
    assert plain.array("edges/weight") is plain.stored_array("edges/weight")


def test_labels_join_with_mini_batches(parted: Store) -> None:
    batch = next(iter(gsplit.NeighborLoader(parted, [3, 3], "train", batch_size=32)))
    assert np.array_equal(batch.y.numpy(), parted.rows("y", batch.n_id[: batch.y.size(0)]))


def test_a_memory_store_has_the_same_view() -> None:
    data = Data(
        x=torch.arange(8.0).reshape(4, 2),
        y=torch.tensor([3, 1, 0, 2]),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        train_mask=torch.tensor([True, False, True, True]),
    )
    store = memory_store(data, torch.tensor([2, 0, 1, 0]))
    assert store.stored_array("y").tolist() == [1, 2, 0, 3]
    assert store.array("y").tolist() == [3, 1, 0, 2]
    assert store.array("targets/train").tolist() == [0, 2, 3]
    assert store.rows("features/x", [3, 0]).tolist() == [[6.0, 7.0], [0.0, 1.0]]


def test_what_has_no_original_order_is_refused(parted: Store, plain: Store) -> None:
    for name in ("indptr", "indices", "edges/weight", "name_bytes"):
        with pytest.raises(gsplit.InputError, match=rf"got {name}, which is in the internal order.*gsplit.to_pyg"):
            parted.array(name)
        with pytest.raises(gsplit.InputError, match=rf"expected a per-vertex array \(got {name}\)"):
            plain.rows(name, [0])


@pytest.mark.parametrize(
    "ids, message",
    [
        ([0, 300, -1], r"ids: expected original ids in 0..299 \(got 2 outside, such as 300\)"),
        ([0.5], r"ids: expected integers in one dimension \(got float64 \[1\]\)"),
        (np.ones(300, bool), r"got bool \[300\]\). Fix: give original ids, not a mask"),
        ([[0]], r"got int64 \[1, 1\]"),
    ],
)
def test_wrong_ids_are_refused(parted: Store, ids: object, message: str) -> None:
    with pytest.raises(gsplit.InputError, match=message):
        parted.rows("y", ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_shard_answers_for_what_it_holds(plain: Store, parted: Store, tmp_path: Path, partitioned: bool) -> None:
    whole = parted if partitioned else plain
    shard = write_shard(whole, tmp_path / "s.gsplit", 100, 180)
    held = np.random.default_rng(0).permutation(shard.original_ids())
    assert np.array_equal(shard.rows("y", held), plain.array("y")[held])
    assert shard.vertex_names(held) == [f"vertex-{i:05d}" for i in held]
    foreign = next(v for v in range(300) if v not in set(held.tolist()))
    with pytest.raises(
        gsplit.InputError, match=rf"expected ids of this shard \(got 2 that it does not hold, such as {foreign}"
    ):
        shard.rows("y", [int(held[0]), foreign, foreign])
    with pytest.raises(
        gsplit.InputError, match=r"all vertices for array\('y'\) \(got a shard with vertices 100..179 of"
    ):
        shard.array("y")
    with pytest.raises(
        gsplit.InputError, match=r"all vertices for vertex_names\(\) .*vertex_names\(store.original_ids"
    ):
        shard.vertex_names()
    empty = write_shard(whole, tmp_path / "e.gsplit", 50, 50)
    with pytest.raises(gsplit.InputError, match="expected ids of this shard .got 1 that it does not hold, such as 3"):
        empty.rows("y", [3])
