"""Opened stores: what they offer, shards and renumbered ones included, and how little opening costs."""

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import sample_store, source_of

import gsplit
from gsplit.errors import StoreError
from gsplit.store.build import build_store
from gsplit.store.manifest import Manifest, ProvenanceStep, Shard
from gsplit.store.reader import Store, open_store
from gsplit.store.statistics import Statistics
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter


def _write(path: Path, arrays: dict[str, tuple[str, Any]], statistics: dict[str, Any], **fields: Any) -> Store:
    """A store made by hand, as later tools will make shards and renumbered ones."""
    with StoreWriter(path) as writer:
        for name, (dtype, values) in arrays.items():
            writer.write(name, dtype, np.asarray(values))
        step = ProvenanceStep(step="by hand", time="now", gsplit_version="0")
        manifest = Manifest(
            arrays=writer.finish_arrays(), statistics=Statistics(**statistics), provenance=[step], **fields
        )
        writer.commit(manifest)
    return open_store(path)


def _share(path: Path, sources: list[int] | None = None, **changed: Any) -> Store:
    """Vertices 4..6 of a renumbered graph of ten."""
    arrays = {
        "indptr": ("int64", [0, 2, 3, 5]),
        "indices": ("int32", sources or [9, 4, 5, 6, 4]),
        "original_ids": ("int64", [8, 2, 1]),
        "y": ("int64", [0, 1, 0]),
        "features/x": ("float32", np.eye(3)),
        "targets/train": ("int64", [6, 4]),
        "target_positions/train": ("int64", [0, 3]),
        "hotness": ("int64", [5, 3, 1]),
    }
    arrays |= {name: (arrays[name][0], values) for name, values in changed.items()}
    statistics = {
        "num_self_loops": 3,
        "num_duplicate_edges": 0,
        "num_isolated_vertices": 0,
        "max_in_degree": 2,
        "in_degree_histogram": [0, 1, 2],
    }
    return _write(
        path,
        arrays,
        statistics,
        num_vertices=10,
        num_edges=5,
        vertex_range=(4, 7),
        part_boundaries=[0, 4, 7, 10],
        num_classes=3,
        shard=Shard(whole_fingerprint="the whole", num_targets={"train": 4}),
    )


@pytest.mark.parametrize(
    "hotness, got", [([3, 5, 1], "3 then 5 at element 1"), ([5, 3, 4], "3 then 4 at element 2"), ([5, 3, -1], "-1")]
)
def test_hotness_falls_inside_a_part(hotness: list[int], got: str, tmp_path: Path) -> None:
    store = _share(tmp_path / "g.gsplit", hotness=hotness)
    with pytest.raises(StoreError, match=f"hotness.npy: expected counts .*got {got}"):
        verify_store(store)


def test_a_share_opens_and_verifies(tmp_path: Path) -> None:
    store = _share(tmp_path / "g.gsplit")
    verify_store(store)
    assert (store.vertex_range, store.num_vertices, store.num_edges) == ((4, 7), 10, 5)
    assert store.graph.sources(6).tolist() == [6, 4]
    assert store.original_ids().tolist() == [8, 2, 1]
    with pytest.raises(IndexError, match=r"vertex: expected 4..6 \(got 3\)"):
        store.graph.sources(3)
    with pytest.raises(gsplit.InputError, match=r"expected all vertices .got a shard, \(4, 7\)"):
        gsplit.to_pyg(store)


def test_order_is_by_original_id(tmp_path: Path) -> None:
    with pytest.raises(gsplit.StoreError, match="expected sources ordered by original id"):
        verify_store(_share(tmp_path / "g.gsplit", [9, 4, 5, 4, 6]))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"targets/train": [4, 6]}, r"targets/train.npy: expected every target once, .* \(got 8 then 1 at element 0\)"),
        ({"targets/train": [6, 6]}, r"targets/train.npy: expected every target once, .* \(got 1 then 1 at element 0\)"),
        (
            {"target_positions/train": [3, 3]},
            r"target_positions/train.npy: expected ascending positions in a list of 4 \(got 3 as element 1, after 3\)",
        ),
    ],
)
def test_targets_stand_once_and_in_order(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    store = _share(tmp_path / "g.gsplit", **changed)
    with pytest.raises(gsplit.StoreError, match=message):
        verify_store(store)


def test_a_fall_between_the_sampled_places_is_found(tmp_path: Path) -> None:
    n, at = 5000, 70
    indptr = np.zeros(n + 1, np.int64)
    indptr[at] = 1
    statistics = dict.fromkeys(["num_self_loops", "num_duplicate_edges", "max_in_degree"], 0)
    store = _write(
        tmp_path / "g.gsplit",
        {"indptr": ("int64", indptr), "indices": ("int32", [])},
        statistics | {"num_isolated_vertices": n, "in_degree_histogram": [n]},
        num_vertices=n,
        num_edges=0,
        vertex_range=(0, n),
        part_boundaries=[0, n],
    )
    with pytest.raises(gsplit.StoreError, match=r"offsets that never decrease \(got 1 then 0 at element 70\)"):
        verify_store(store)


@pytest.mark.parametrize(
    "ids, message",
    [
        ([0, 1, 1], r"original_ids.npy: expected every id once \(got 1 in 2 rows\)"),
        ([0, 1, 3], "original_ids.npy: expected ids in 0..2"),
    ],
)
def test_original_ids_are_a_permutation(tmp_path: Path, ids: list[int], message: str) -> None:
    arrays = {"indptr": ("int64", [0, 0, 0, 0]), "indices": ("int32", []), "original_ids": ("int64", ids)}
    statistics = dict.fromkeys(["num_self_loops", "num_duplicate_edges", "max_in_degree"], 0)
    with pytest.raises(gsplit.StoreError, match=message):
        verify_store(
            _write(
                tmp_path / "g.gsplit",
                arrays,
                statistics | {"num_isolated_vertices": 3, "in_degree_histogram": [3]},
                num_vertices=3,
                num_edges=0,
                vertex_range=(0, 3),
                part_boundaries=[0, 3],
            )
        )


def test_a_renumbered_store_gives_pyg_its_original_ids_back(tmp_path: Path) -> None:
    plain = build_store(source_of(3, np.array([0, 1, 2]), np.array([1, 2, 2])), tmp_path / "plain.gsplit")
    arrays = {  # vertex i was (i + 1) % 3
        "indptr": ("int64", [0, 1, 3, 3]),
        "indices": ("int32", [2, 0, 1]),
        "original_ids": ("int64", [1, 2, 0]),
        "features/x": ("float64", [[1.0], [2.0], [0.0]]),
        "targets/train": ("int64", [2, 1]),
    }
    store = _write(
        tmp_path / "g.gsplit",
        arrays,
        plain.manifest.statistics.model_dump(),
        num_vertices=3,
        num_edges=3,
        vertex_range=(0, 3),
        part_boundaries=[0, 3],
    )
    verify_store(store)
    data, want = gsplit.to_pyg(store), gsplit.to_pyg(plain)
    assert sorted(data.edge_index.T.tolist()) == sorted(want.edge_index.T.tolist())
    assert data.x.tolist() == [[0.0], [1.0], [2.0]]
    assert data.train_mask.tolist() == [True, False, True]


def test_names_and_arrays(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    assert repr(store) == f"Store('{store.path}', 300 vertices, 3000 edges)"
    assert store.vertex_names(np.array([0, 299])) == ["vertex-00000", "vertex-00299"]
    assert not store.stored_array("features/x").flags.writeable
    with pytest.raises(gsplit.InputError, match=r"expected one of edges/weight, .* \(got z\)"):
        store.stored_array("z")
    for name in store.names:  # a store is plain numpy: anybody can read it
        file = store.path / f"{name}.npy"
        assert np.array_equal(np.load(file, allow_pickle=False), store.stored_array(name))
        digest = hashlib.sha256(file.read_bytes()[128:]).hexdigest()
        assert digest == json.loads((store.path / "manifest.json").read_text())["arrays"][name]["sha256"]


def test_arrays_outlive_the_files(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    before = torch.from_numpy(np.array(store.stored_array("features/x")))
    for file in store.path.rglob("*.npy"):
        file.unlink()
    assert torch.equal(torch.from_numpy(np.array(store.stored_array("features/x"))), before)


def test_opening_is_quick_and_small_whatever_the_size(tmp_path: Path) -> None:
    """A store of 2 GB of holes: milliseconds and a few pages. The figures at real size are in benchmarks/results."""
    n, e = 1 << 25, 1 << 28
    with StoreWriter(tmp_path / "g.gsplit") as writer:
        indptr = writer.place("indptr", "int64", (n + 1,))
        for first in range(0, n + 1, 1 << 20):
            piece = np.arange(first, min(first + (1 << 20), n + 1))
            indptr[first : first + (1 << 20)] = piece * (e // n)
        writer.place("indices", "int32", (e,))
        statistics = Statistics(
            num_self_loops=0, num_duplicate_edges=0, num_isolated_vertices=0, max_in_degree=8, in_degree_histogram=[]
        )
        writer.commit(
            Manifest(
                num_vertices=n,
                num_edges=e,
                vertex_range=(0, n),
                part_boundaries=[0, n],
                arrays=writer.finish_arrays(),
                statistics=statistics,
                provenance=[],
            )
        )
    code = """
import sys, time, gsplit, gsplit.store.reader
def rss():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
before, start = rss(), time.process_time()
store = gsplit.open(sys.argv[1])
print(time.process_time() - start, rss() - before)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "g.gsplit")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=300) for _ in range(3)]
    seconds, kilobytes = min(tuple(float(v) for v in run.stdout.split()) for run in runs)
    assert seconds < 0.05
    assert kilobytes < 50_000
    start = time.process_time()
    with pytest.raises(gsplit.StoreError, match="expected the directory of a store"):
        gsplit.open(tmp_path / "absent.gsplit")
    assert time.process_time() - start < 0.05
    with pytest.raises(gsplit.StoreError, match="Fix: give the whole name, .*/g.gsplit"):
        gsplit.open(tmp_path / "g")


def _with(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *keys, last = path.split(".")
    inner = manifest
    for key in keys:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return manifest


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("shard", None, "shard is missing, and vertex_range is not the whole"),
        ("arrays.target_positions/train", None, "target_positions go with the targets of a shard"),
        ("arrays.target_positions/train.shape", [1], "target_positions/train: 1 for 2 targets"),
        ("shard.num_targets", {}, "shard.num_targets.train: 2 or more, as many as are here"),
        ("shard.num_targets.train", 1, "shard.num_targets.train: 2 or more, as many as are here"),
        ("part_statistics", {"num_batches": 1, "loads": [1, 1], "links": [[1]]}, "must be those of 3 parts"),
    ],
)
def test_a_share_that_contradicts_itself_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = _share(tmp_path / "g.gsplit").path / "manifest.json"
    file.write_text(json.dumps(_with(json.loads(file.read_text()), path, value)))
    with pytest.raises(gsplit.StoreError, match=re.escape(message)):
        open_store(tmp_path / "g.gsplit")


def test_a_directory_that_is_no_store_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="manifest.json: expected the manifest of a store .got no such file."):
        open_store(tmp_path)
