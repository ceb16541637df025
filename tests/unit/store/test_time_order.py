"""Orders by time: added to a store, kept by partitioning and shards, mapped by samplers, and checked."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from temporal_programs import CLASSES, WIDTH, seed_targets, temporal_edges, temporal_store
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, StoreError
from gsplit.sampling.temporal import open_edge_times
from gsplit.store.feature_types import write_with_time_order
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.verify import verify_store


def _plain(path: Path) -> Store:
    src, dst, time = temporal_edges()
    store, _ = temporal_store("original")
    data = Data(
        x=torch.from_numpy(store.stored_array("features/x")),
        y=torch.from_numpy(store.stored_array("y")),
        edge_index=torch.stack([torch.from_numpy(src), torch.from_numpy(dst)]),
        time=torch.from_numpy(time),
        weight=torch.rand(src.size),
    )
    return gsplit.from_pyg(data, path)


def _assert_ordered(store: Store) -> None:
    """Position by position, against sorting each column in Python."""
    verify_store(store)
    graph = store.graph
    time = store.stored_array("edges/time").tolist()
    order = store.stored_array("time_order/time").tolist()
    for start, stop in zip(graph.indptr[:-1].tolist(), graph.indptr[1:].tolist(), strict=True):
        assert order[start:stop] == sorted(range(stop - start), key=lambda place: (time[start + place], place))


def test_the_order_is_added_and_kept_by_partitions_and_shards(tmp_path: Path) -> None:
    plain = _plain(tmp_path / "g.gsplit")
    assert json.loads((plain.path / "manifest.json").read_text())["version"] == 2
    output = tmp_path / "t.gsplit"
    result = CliRunner().invoke(app, ["convert", str(plain.path), str(output), "--add", "time_order/time", "--json"])
    assert result.exit_code == 0, result.output
    ordered = open_store(output)
    assert ordered.manifest.version == 3 and ordered.manifest.provenance[-1].settings == {"add": "time_order/time"}
    parts = gsplit.partition(ordered, tmp_path / "p.gsplit", 4, [2, 2], None, batch_size=20)
    first, stop = parts.part_boundaries[1], parts.part_boundaries[3]
    for store in (ordered, parts, write_shard(parts, tmp_path / "s.gsplit", first, stop)):
        _assert_ordered(store)
        edges = open_edge_times(store, store.graph, "time")
        assert np.shares_memory(edges.order, store.stored_array("time_order/time"))  # mapped, not made
    assert gsplit.to_pyg(ordered).time.shape == (len(temporal_edges()[0]),)


def test_a_stored_order_gives_the_same_mini_batches(tmp_path: Path) -> None:
    plain = _plain(tmp_path / "g.gsplit")
    ordered = write_with_time_order(plain, tmp_path / "t.gsplit", "time")
    ids, times = seed_targets()
    found = []
    for store in (plain, ordered):
        loader = gsplit.NeighborLoader(store, [3, 2], ids, input_time=times, time_attr="time", batch_size=30)
        found.append(loader.make_batch(0, 0).frontier(0).names)
        assert loader._makers[0].strategy.num_range_bytes == (0 if store is ordered else 4 * store.num_edges)
    assert torch.equal(*found)
    checked = gsplit.verify(
        GraphSAGE(WIDTH, 8, 2, CLASSES),
        ordered,
        [3, 2],
        ids,
        input_time=times,
        time_attr="time",
        batch_size=30,
        mesh=solo_mesh(),
        strategy="data",
    )
    assert checked.ok and checked.largest_gradient > 0


def test_a_wrong_order_is_found(tmp_path: Path) -> None:
    store = write_with_time_order(_plain(tmp_path / "g.gsplit"), tmp_path / "t.gsplit", "time")
    file = store.path / "time_order" / "time.npy"
    order = np.load(file)
    start = int(store.graph.indptr[:-1][np.diff(store.graph.indptr) > 1][0])
    order[[start, start + 1]] = order[[start + 1, start]]
    np.save(file, order)
    manifest = store.path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["arrays"]["time_order/time"]["sha256"] = hashlib.sha256(order.tobytes()).hexdigest()
    manifest.write_text(json.dumps(content))
    with pytest.raises(StoreError, match=f"time_order/time.npy: expected position .* for edge {start}, by the times"):
        verify_store(open_store(store.path))
    content["arrays"]["edges/other"] = content["arrays"].pop("edges/time")
    manifest.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="time_order/time goes with integers edges/time"):
        open_store(store.path)
    content["version"] = 2
    manifest.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="version 2 does not have orders by time, .*version 3 does"):
        open_store(store.path)


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    plain = _plain(tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="edges/weight: expected one integer per edge .got float32"):
        write_with_time_order(plain, tmp_path / "a.gsplit", "weight")
    ordered = write_with_time_order(plain, tmp_path / "t.gsplit", "time")
    with pytest.raises(InputError, match="a store without time_order/time .got one that has time_order/time"):
        write_with_time_order(ordered, tmp_path / "b.gsplit", "time")
    refused = CliRunner().invoke(app, ["convert", str(plain.path), str(tmp_path / "c"), "--add", "time_order/"])
    assert refused.exit_code != 0 and "--add time_order/NAME" in " ".join(refused.output.split())
