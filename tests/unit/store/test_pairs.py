"""Stored pairs and ``internal_ids``: written, copied by partitioning and shards, and checked."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import source_of
from rich.console import Console
from torch_geometric.data import Data

import gsplit
from gsplit.cli.store_view import describe, show
from gsplit.errors import InputError, StoreError
from gsplit.store.build import build_store
from gsplit.store.importers.pyg import memory_store
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import host_range, write_shard
from gsplit.store.source import PairList
from gsplit.store.verify import verify_store

N = 60
E = 400


def _pair_lists(seed: int = 1) -> dict[str, PairList]:
    rng = np.random.default_rng(seed)
    train = PairList(rng.integers(0, N, (25, 2)))
    labels = rng.integers(0, 3, 9).astype(np.int16)
    test = PairList(rng.integers(0, N, (9, 2)), labels, rng.integers(0, N, (9, 4)))
    return {"train": train, "test": test, "empty": PairList(np.empty((0, 2), np.int64))}


def _plain(path: Path) -> Store:
    rng = np.random.default_rng(0)
    src = rng.integers(0, N, E)
    dst = rng.integers(0, N, E)
    return build_store(source_of(N, src, dst, targets={"train": np.arange(0, N, 2)}, pairs=_pair_lists()), path)


def _assert_pairs(store: Store) -> None:
    """The pairs of ``_pair_lists``, whatever was done to the store."""
    wanted = _pair_lists()
    assert store.pair_names == ("empty", "test", "train")
    for name, expected in wanted.items():
        assert store.pairs(name).dtype == np.int64
        assert np.array_equal(store.pairs(name), expected.pairs)
        for found, array in (
            (store.pair_labels(name), expected.labels),
            (store.pair_negatives(name), expected.negatives),
        ):
            assert (found is None) == (array is None)
            assert array is None or (found is not None and np.array_equal(found, array))
    assert store.dtype("pair_labels/test") == "int16"


def test_pairs_come_back_as_given(tmp_path: Path) -> None:
    store = _plain(tmp_path / "g.gsplit")
    _assert_pairs(store)
    assert np.array_equal(store.array("pairs/train"), store.pairs("train"))
    assert not store.pairs("train").flags.writeable
    assert store.manifest.version == 3
    assert np.array_equal(store.internal_ids, np.arange(N))


def test_a_graph_in_memory_has_internal_ids_and_no_pairs() -> None:
    rng = np.random.default_rng(3)
    edges = torch.from_numpy(rng.integers(0, N, (2, E)))
    parts = torch.from_numpy(rng.integers(0, 3, N))
    store = memory_store(Data(edge_index=edges, num_nodes=N), parts)
    assert store.pair_names == ()
    assert np.array_equal(store.internal_ids[store.original_ids()], np.arange(N))
    assert not np.array_equal(store.internal_ids, np.arange(N))


@pytest.mark.parametrize("act", ["pairs", "pair_labels", "pair_negatives"])
def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, act: str) -> None:
    store = _plain(tmp_path / "g.gsplit")
    with pytest.raises(InputError, match=r"pairs/empty, pairs/test, pairs/train \(got pairs/val\)"):
        getattr(store, act)("val")


def test_a_store_without_them_keeps_version_2(tmp_path: Path) -> None:
    store = build_store(source_of(3, np.array([0, 1]), np.array([1, 2])), tmp_path / "g.gsplit")
    assert store.manifest.version == 2
    with pytest.raises(InputError, match="expected pairs .got none; pairs/train was asked for"):
        store.pairs("train")
    text = (tmp_path / "g.gsplit" / "manifest.json").read_text()
    (tmp_path / "g.gsplit" / "manifest.json").write_text(text.replace('"version": 2', '"version": 4'))
    with pytest.raises(StoreError, match="versions 2 to 3, this one has version 4"):
        open_store(tmp_path / "g.gsplit")


def test_version_2_with_pairs_is_refused(tmp_path: Path) -> None:
    manifest = _plain(tmp_path / "g.gsplit").path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 3', '"version": 2'))
    with pytest.raises(StoreError, match="version 2 does not have internal_ids and pairs"):
        open_store(manifest.parent)


@pytest.mark.parametrize(
    "found, message",
    [
        (PairList(np.zeros((4, 3), np.int64)), r"pairs/p: expected int64 of shape \[n, 2\].*int64 \[4, 3\]"),
        (PairList(np.zeros(4, np.int64)), r"pairs/p: .*got int64 \[4\]"),
        (PairList(np.zeros((4, 2), np.float32)), r"pairs/p: .*got float32 \[4, 2\]"),
        (PairList(np.array([[0, 1], [2, N]])), rf"pairs/p: expected ids in 0..{N - 1} .got \[2, {N}\] in row 1"),
        (PairList(np.array([[0, -1]])), r"pairs/p: .*\[0, -1\] in row 0"),
        (PairList(np.zeros((4, 2), np.int64), np.zeros(3, np.int64)), r"pair_labels/p: .*n = 4 .got int64 \[3\]"),
        (PairList(np.zeros((1, 2), np.int64), None, np.array([[1, N]])), r"pair_negatives/p: .*\[1, 60\] in row 0"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path: Path, found: PairList, message: str) -> None:
    source = source_of(N, np.array([0]), np.array([1]), pairs={"p": found})
    with pytest.raises(InputError, match=message):
        build_store(source, tmp_path / "g.gsplit")


def _partitioned(tmp_path: Path) -> Store:
    plain = _plain(tmp_path / "g.gsplit")
    return gsplit.partition(plain, tmp_path / "p.gsplit", 3, [3], batch_size=16, epochs=1)


def _drop_internal_ids(store: Store) -> Store:
    """The store as an older version wrote it."""
    manifest = json.loads((store.path / "manifest.json").read_text())
    del manifest["arrays"]["internal_ids"]
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    (store.path / "internal_ids.npy").unlink()
    return open_store(store.path)


def test_partitioning_and_shards_keep_pairs_and_write_internal_ids(tmp_path: Path) -> None:
    store = _partitioned(tmp_path)
    inverse = {original: internal for internal, original in enumerate(store.original_ids().tolist())}
    shards = [write_shard(store, tmp_path / f"s{i}.gsplit", *host_range(store, i, 2)) for i in range(2)]
    for found in (store, *shards):
        verify_store(found)
        _assert_pairs(found)
        assert found.internal_ids.tolist() == [inverse[original] for original in range(N)]
        assert found.stored_array("internal_ids").dtype == np.int32
        assert found.manifest.version == 3
        assert np.array_equal(found.array("internal_ids"), found.internal_ids)
    assert store.internal_ids.tolist() != list(range(N))


def test_older_partitioned_stores_compute_internal_ids(tmp_path: Path) -> None:
    store = _partitioned(tmp_path)
    shard = write_shard(store, tmp_path / "s.gsplit", *host_range(store, 0, 2))
    stored = np.array(store.internal_ids)
    fingerprint = store.fingerprint
    older = _drop_internal_ids(store)
    verify_store(older)
    assert older.fingerprint == fingerprint
    assert np.array_equal(older.internal_ids, stored)
    assert not older.internal_ids.flags.writeable
    with pytest.raises(InputError, match="a shard with vertices .* without internal_ids"):
        _ = _drop_internal_ids(shard).internal_ids


def test_a_shard_of_the_original_numbering_has_internal_ids(tmp_path: Path) -> None:
    shard = write_shard(_plain(tmp_path / "g.gsplit"), tmp_path / "s.gsplit", 10, 30)
    _assert_pairs(shard)
    verify_store(shard)
    assert np.array_equal(shard.internal_ids, np.arange(N))
    assert "internal_ids" not in shard.names


def _edit(store: Store, name: str, place: int, value: int) -> Store:
    """The store with another element and a checksum that fits it."""
    file = store.path / f"{name}.npy"
    array = np.load(file)
    array.reshape(-1)[place] = value
    np.save(file, array)
    manifest = store.path / "manifest.json"
    old = store.manifest.arrays[name].sha256
    manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(array.tobytes()).hexdigest()))
    return open_store(store.path)


def test_verify_finds_internal_ids_that_are_not_the_inverse(tmp_path: Path) -> None:
    store = _partitioned(tmp_path)
    first, stop = host_range(store, 0, 2)
    shard = write_shard(store, tmp_path / "s.gsplit", first, stop)
    foreign = int(store.original_ids()[stop])
    held = int(store.original_ids()[first])
    with pytest.raises(StoreError, match=rf"internal_ids.npy: expected every id once: {stop - first} in"):
        verify_store(_edit(shard, "internal_ids", foreign, first))
    with pytest.raises(StoreError, match=rf"internal_ids.npy: expected {first} for original id {held}, .*got {stop}"):
        verify_store(_edit(store, "internal_ids", held, stop))


@pytest.mark.parametrize("name", ["pairs/many", "pair_negatives/many", "internal_ids"])
def test_ids_between_the_places_that_opening_reads_are_found_by_verify(tmp_path: Path, name: str) -> None:
    many = PairList(np.zeros((20_000, 2), np.int64), None, np.ones((20_000, 2), np.int64))
    n = 40_000
    plain = build_store(source_of(n, np.array([0]), np.array([1]), pairs={"many": many}), tmp_path / "g.gsplit")
    if name == "internal_ids":
        plain = gsplit.partition(plain, tmp_path / "p.gsplit", 2, [1], None, objective="random", solver="random")
    damaged = _edit(plain, name, 100, n)
    with pytest.raises(StoreError, match=rf"{name}.npy: expected ids in 0..39999 .got 40000 as element 100"):
        verify_store(damaged)


def test_inspect_shows_pairs(tmp_path: Path) -> None:
    document = describe(_plain(tmp_path / "g.gsplit"))
    assert document["pairs"]["test"] == {"num_pairs": 9, "labels": "int16", "num_negatives": 4}
    assert document["pairs"]["train"] == {"num_pairs": 25, "labels": None, "num_negatives": 0}
    console = Console(file=io.StringIO(), width=80)
    show(document, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "9, labels int16, 4 negatives each" in text
