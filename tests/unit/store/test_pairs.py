"""Stored pairs and ``internal_ids``: written, copied by partitioning and shards, and checked."""

import hashlib
import io
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import source_of
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch_geometric.data import Data
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.cli.store_view import describe, show
from gsplit.errors import InputError, StoreError
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_internal_ids
from gsplit.store.importers.pyg import memory_store
from gsplit.store.pairs import check_pairs
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
    with pytest.raises(InputError, match="expected pairs .got no pairs/train among "):
        store.pairs("train")
    text = (tmp_path / "g.gsplit" / "manifest.json").read_text()
    (tmp_path / "g.gsplit" / "manifest.json").write_text(text.replace('"version": 2', '"version": 4'))
    with pytest.raises(StoreError, match="versions 2 to 3, this one has version 4"):
        open_store(tmp_path / "g.gsplit")


def test_version_2_with_pairs_is_refused(tmp_path: Path) -> None:
    manifest = _plain(tmp_path / "g.gsplit").path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 3', '"version": 2'))
    with pytest.raises(StoreError, match="version 2 does not have .*internal_ids, pairs and vertex types"):
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
    """A store without pairs as an older version wrote it."""
    manifest = json.loads((store.path / "manifest.json").read_text())
    del manifest["arrays"]["internal_ids"]
    manifest["version"] = 2
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
    store = gsplit.partition(_data(), tmp_path / "p.gsplit", 3, [3], None, batch_size=16, epochs=1)
    assert store.manifest.version == 3
    shard = write_shard(store, tmp_path / "s.gsplit", *host_range(store, 0, 2))
    stored = np.array(store.internal_ids)
    fingerprint = store.fingerprint
    older = _drop_internal_ids(store)
    verify_store(older)
    assert older.fingerprint == fingerprint
    assert np.array_equal(older.internal_ids, stored)
    assert not older.internal_ids.flags.writeable
    converted = write_with_internal_ids(older, tmp_path / "c.gsplit")
    verify_store(converted)
    assert np.array_equal(converted.stored_array("internal_ids"), stored)
    assert (converted.manifest.version, converted.fingerprint) == (3, fingerprint)
    older_shard = _drop_internal_ids(shard)
    with pytest.raises(InputError, match="a shard with vertices .* without internal_ids.*--add internal_ids"):
        _ = older_shard.internal_ids
    for unfit, got in ((older_shard, "a shard"), (converted, "a store that has them")):
        with pytest.raises(InputError, match=f"partitioned store without internal_ids .got {got}"):
            write_with_internal_ids(unfit, tmp_path / "d.gsplit")
    assert not (tmp_path / "d.gsplit").exists()


def test_convert_adds_internal_ids(tmp_path: Path) -> None:
    store = gsplit.partition(_data(), tmp_path / "p.gsplit", 3, [3], None, batch_size=16, epochs=1)
    expected = np.array(store.internal_ids)
    path = str(_drop_internal_ids(store).path)
    output = str(tmp_path / "c.gsplit")
    result = CliRunner().invoke(app, ["convert", path, output, "--add", "internal_ids", "--json"])
    assert result.exit_code == 0, result.output
    assert np.array_equal(open_store(output).stored_array("internal_ids"), expected)
    for wrong in ([], ["--add", "y"], ["--add", "internal_ids", "--features", "float16"]):
        refused = CliRunner().invoke(app, ["convert", path, str(tmp_path / "d.gsplit"), *wrong])
        assert refused.exit_code != 0
        assert "expected --features TYPE, --add internal_ids or" in refused.output


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
        path = tmp_path / "p.gsplit"
        plain = gsplit.partition(plain, path, 2, [1], None, objective="random", solver="random", batch_size=n, epochs=1)
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


def _data() -> Data:
    rng = np.random.default_rng(5)
    return Data(edge_index=torch.from_numpy(rng.integers(0, N, (2, E))), num_nodes=N)


def test_pairs_of_a_data_object(tmp_path: Path) -> None:
    ends = torch.tensor([[4, 1, 59], [0, 3, 59]], dtype=torch.int32)
    store = gsplit.from_pyg(
        _data(),
        tmp_path / "g.gsplit",
        pairs={"train": ends, "test": ends[:, :1]},
        pair_labels={"train": torch.tensor([0.5, 1.0, 2.0])},
        pair_negatives={"test": torch.tensor([[7, 8]])},
    )
    verify_store(store)
    assert store.pairs("train").tolist() == [[4, 0], [1, 3], [59, 59]]
    labels = store.pair_labels("train")
    negatives = store.pair_negatives("test")
    assert labels is not None and labels.tolist() == [0.5, 1.0, 2.0]
    assert negatives is not None and negatives.tolist() == [[7, 8]]
    assert store.pair_labels("test") is None
    assert gsplit.to_pyg(store).edge_index.tolist() == _data().edge_index.tolist()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pairs": {"a b": torch.zeros(2, 3, dtype=torch.long)}}, "names: expected plain words .got array name"),
        ({"pairs": {"p": torch.zeros(3, 2, dtype=torch.long)}}, r"pairs p: expected integers of shape \[2, E\]"),
        ({"pairs": {"p": torch.zeros(2, 3)}}, r"pairs p: .*got float32 \[2, 3\]"),
        ({"pairs": {"p": torch.tensor([[0], [N]])}}, rf"pairs/p: expected ids in 0..{N - 1} .got \[0, {N}\] in row 0"),
        ({"pair_labels": {"p": torch.zeros(3)}}, "pair_labels: expected names of pairs: none are given .got p"),
    ],
)
def test_pairs_of_a_data_object_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gsplit.from_pyg(_data(), tmp_path / "g.gsplit", **options)
    assert not (tmp_path / "g.gsplit").exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_pairs_are_added_to_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    before = gsplit.from_pyg(_data(), tmp_path / "g.gsplit")
    assert before.manifest.version == 2
    if not has_links:
        monkeypatch.setattr(os, "link", _refuse_links)
    ends = np.array([[1, 2, 3], [4, 5, 6]])
    gsplit.add_pairs(before, "val", ends, labels=np.array([1, 0, 1]))
    store = gsplit.add_pairs(before, "train", ends[:, :2], negatives=np.zeros((2, 1), np.int32))
    verify_store(store)
    assert (store.manifest.version, store.fingerprint) == (3, before.fingerprint)
    assert store.pair_names == ("train", "val")
    assert store.pairs("val").tolist() == [[1, 4], [2, 5], [3, 6]]
    assert before.graph.num_edges == store.graph.num_edges  # still open, as it was
    assert np.array_equal(before.graph.indices, store.graph.indices)
    with pytest.raises(InputError, match="expected other pairs than train, val .got train"):
        gsplit.add_pairs(store, "train", ends)
    replaced = gsplit.add_pairs(store, "train", ends, replace=True)
    verify_store(replaced)
    assert replaced.pairs("train").shape == (3, 2)
    assert replaced.pair_negatives("train") is None  # of the list that was replaced
    assert [path.name for path in tmp_path.iterdir()] == ["g.gsplit"]


def _refuse_links(*args: object, **options: object) -> None:
    raise OSError("no links here")


def test_pairs_that_cannot_be_added_leave_the_store(tmp_path: Path) -> None:
    store = gsplit.from_pyg(_data(), tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="pairs/p: expected ids in"):
        gsplit.add_pairs(store, "p", np.array([[0], [N]]))
    with pytest.raises(InputError, match="names: expected plain words"):
        gsplit.add_pairs(store, "../p", np.array([[0], [1]]))
    assert open_store(store.path).manifest == store.manifest


@given(name=st.text(max_size=70) | st.from_regex(r"[A-Za-z_][A-Za-z0-9_\-]{0,70}", fullmatch=True))
def test_names_of_pairs_are_those_of_targets(name: str) -> None:
    ends = PairList(np.zeros((1, 2), np.int64))
    is_word = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_\-]{0,63}", name) is not None
    with nullcontext() if is_word else pytest.raises(InputError, match="names: expected plain words"):
        check_pairs(name, ends, 1)
