"""Shares of hosts: together they are the whole, and each is a store that can be checked by itself."""

import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import sample_store

import gsplit
from gsplit.graph.ownership import Ownership
from gsplit.store.shard import host_range, write_shard
from gsplit.store.verify import verify_store


@pytest.mark.parametrize("partitioned", [False, True])
def test_shares_are_the_whole(tmp_path: Path, partitioned: bool) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    if partitioned:
        store = gsplit.partition(store, tmp_path / "p.gsplit", 6, [3, 3], batch_size=64, epochs=1)
    ranges = [host_range(store, host, 3, 2) for host in range(3)]
    assert [first for first, _ in ranges][1:] == [stop for _, stop in ranges][:-1]
    assert (ranges[0][0], ranges[-1][1]) == (0, 300)
    shards = [write_shard(store, tmp_path / f"{i}.gsplit", *ranges[i]) for i in range(3)]
    for shard in shards:
        verify_store(shard)
        assert shard.fingerprint == store.fingerprint
        assert shard.part_boundaries == store.part_boundaries and shard.part_loads == store.part_loads
    for name in ("indices", "edges/weight", "features/x", "y", "name_bytes"):
        assert np.array_equal(np.concatenate([shard.stored_array(name) for shard in shards]), store.stored_array(name))
    assert np.array_equal(np.concatenate([shard.original_ids() for shard in shards]), store.original_ids())
    for name in ("train", "test"):
        places = np.concatenate([shard.stored_targets(name)[1] for shard in shards])
        ids = np.concatenate([shard.stored_array(f"targets/{name}") for shard in shards])
        assert np.array_equal(ids[np.argsort(places)], store.stored_array(f"targets/{name}"))
    names = [shard.vertex_names(shard.original_ids()) for shard in shards]
    assert [name for some in names for name in some] == store.vertex_names(store.original_ids())


def test_a_rank_runs_from_its_share(tmp_path: Path) -> None:
    """On one rank that owns everything here: a shard of all vertices draws what the whole store draws."""
    store = sample_store(tmp_path / "g.gsplit")
    shard = write_shard(store, tmp_path / "s.gsplit", 0, 300)
    for nodes in ("train", None, torch.arange(0, 90, 4)):
        one, other = (
            [(b.n_id.tolist(), b.x.tolist()) for b in gsplit.NeighborLoader(s, [3, 2], nodes, batch_size=40)]
            for s in (store, shard)
        )
        assert one == other


def test_what_cannot_be_cut_is_said(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    with pytest.raises(gsplit.InputError, match="host: expected a number from 0 below the number of hosts"):
        host_range(store, 2, 2)
    shard = write_shard(store, tmp_path / "s.gsplit", 100, 200)
    with pytest.raises(gsplit.InputError, match="expected a whole store .got a shard"):
        write_shard(shard, tmp_path / "t.gsplit", 100, 150)
    with pytest.raises(gsplit.StoreError, match="s.gsplit"):
        write_shard(store, tmp_path / "s.gsplit", 0, 100)
    with pytest.raises(gsplit.InputError, match=r"rank 0: expected vertices 0..300 .got a shard 100..200"):
        gsplit.NeighborLoader(shard, [2], "train", batch_size=8, ownership=Ownership((0, 300)))


@pytest.mark.parametrize(
    "places, seen_by", [([0, 149], "verify"), ([0, 150], "open"), ([-1, 3], "open"), ([5, 5], "verify")]
)
def test_places_that_cannot_be_are_refused(tmp_path: Path, places: list[int], seen_by: str) -> None:
    """The shard's first two targets are moved to other places of the list of 150, checksum and all."""
    store = sample_store(tmp_path / "g.gsplit")
    shard = write_shard(store, tmp_path / "s.gsplit", 100, 200)
    file = shard.path / "target_positions" / "train.npy"
    array = np.load(file)
    array[:2] = places
    np.save(file, array)
    manifest = shard.path / "manifest.json"
    old = shard.manifest.arrays["target_positions/train"].sha256
    manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(array.tobytes()).hexdigest()))
    with pytest.raises(gsplit.StoreError, match=r"target_positions/train.npy: expected"):
        verify_store(gsplit.open(shard.path))
    if seen_by == "open":
        with pytest.raises(gsplit.StoreError, match=r"target_positions/train.npy: expected ids in 0..149"):
            gsplit.open(shard.path)


def _shard_of_a_large_graph(folder: Path, num_vertices: int) -> Path:
    """A shard of a partitioned graph that is made to look like one of ``num_vertices``, by its largest original id."""
    store = gsplit.partition(sample_store(folder / "g.gsplit"), folder / "p.gsplit", 2, [3], batch_size=64, epochs=1)
    shard = write_shard(store, folder / "s.gsplit", 100, 200)
    ids = np.load(shard.path / "original_ids.npy")
    ids[ids.argmax()] = num_vertices - 1
    np.save(shard.path / "original_ids.npy", ids)
    manifest = json.loads((shard.path / "manifest.json").read_text())
    manifest["num_vertices"] = manifest["part_boundaries"][-1] = num_vertices
    del manifest["arrays"]["internal_ids"]  # a row per vertex of the graph: a gigabyte
    (shard.path / "internal_ids.npy").unlink()
    manifest["arrays"]["original_ids"]["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
    (shard.path / "manifest.json").write_text(json.dumps(manifest))
    return shard.path


def test_verifying_a_shard_takes_the_memory_of_the_shard(tmp_path: Path) -> None:
    shard = gsplit.open(_shard_of_a_large_graph(tmp_path, 1 << 27))
    tracemalloc.start()
    try:
        verify_store(shard)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20  # 1 GiB if it were 8 bytes per vertex of the whole graph
