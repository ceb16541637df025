"""Stores on object storage, against a real S3 server on this host and a proxy that fails requests."""

import os
import shutil
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from typed_graphs import academic

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, MissingDependencyError, StoreError, UnavailableError
from gsplit.features.remote import RemoteRows
from gsplit.files import objects
from gsplit.files.objects import ObjectFolder
from gsplit.loading.tiers import open_features, open_typed_features
from gsplit.minibatch.local_graph import LocalGraph, make_ownership
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard
from gsplit.store.upload import upload_store
from gsplit.store.verify import verify_store
from gsplit_bench.s3_server import BUCKET, FaultyProxy, s3_environment

URL = f"s3://{BUCKET}/p.gsplit"


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Five parts; features of 2 MB, which are 8 blocks."""
    folder = tmp_path_factory.mktemp("remote")
    graph = PlantedGraph(4000, 20000, num_communities=10, num_features=128, num_classes=4)
    plain = build_store(synthetic_source(graph), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 5, [4, 4], batch_size=200, epochs=2)


@pytest.fixture(scope="module")
def on_server(s3_server: int, parted: Store) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(s3_server).items():
            patch.setenv(name, value)
        upload_store(parted, URL)
    return URL


@pytest.fixture
def uploaded(on_server: str, s3_proxy: FaultyProxy) -> str:
    """The store, which tests do not change, to be read through the s3_proxy."""
    return on_server


def _same_arrays(store: Store, want: Store) -> None:
    assert store.names == want.names
    for name in want.names:
        np.testing.assert_array_equal(store.stored_array(name), want.stored_array(name))


def test_a_store_is_fetched_as_it_is_used_and_once(
    uploaded: str, s3_proxy: FaultyProxy, parted: Store, tmp_path: Path
) -> None:
    before = s3_proxy.num_bytes
    store = gsplit.open(uploaded, cache_dir=tmp_path)
    assert store.num_vertices == 4000 and store.num_features == 128
    assert s3_proxy.num_bytes - before < 20_000  # the manifest
    _same_arrays(store, parted)
    verify_store(store)
    assert store.fingerprint == parted.fingerprint
    assert repr(store) == f"Store('{uploaded}', 4000 vertices, {parted.num_edges} edges)"
    before = s3_proxy.num_bytes
    again = gsplit.open(Path(uploaded), cache_dir=tmp_path)
    _same_arrays(again, parted)
    assert s3_proxy.num_bytes - before < 20_000


def test_threads_and_processes_fetch_a_file_once(uploaded: str, s3_proxy: FaultyProxy, tmp_path: Path) -> None:
    stores = [gsplit.open(uploaded, cache_dir=tmp_path) for _ in range(4)]
    before = s3_proxy.num_bytes
    threads = [threading.Thread(target=store.stored_array, args=("indices",)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_bytes = stores[0].stored_array("indices").nbytes
    assert num_bytes < s3_proxy.num_bytes - before < num_bytes + 10_000


@pytest.mark.parametrize("cache_bytes", [0, 200_000, "1GB"])
def test_rows_are_read_by_ranges_and_the_hottest_from_disk(
    cache_bytes: int | str, uploaded: str, s3_proxy: FaultyProxy, parted: Store, tmp_path: Path
) -> None:
    mesh = solo_mesh()
    store = gsplit.open(uploaded, cache_dir=tmp_path, cache_bytes=cache_bytes)
    local = LocalGraph(store, mesh, make_ownership(store, mesh, None))
    rows = open_features(local, ["x"])
    ids = torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:700]
    out = torch.zeros(700, 128)
    before = s3_proxy.num_bytes
    read = rows.read(ids, out)
    np.testing.assert_array_equal(out.numpy(), parted.stored_array("features/x")[ids.numpy()])
    hot = {0: 0, "1GB": 700}.get(cache_bytes)
    assert read.hits == hot if hot is not None else 0 < read.hits < 700
    assert (s3_proxy.num_bytes > before) == (read.hits < 700)
    assert not (store.mirror.folder / "features" / "x.npy").exists()  # type: ignore[union-attr]
    before = s3_proxy.num_bytes
    again = open_features(local, ["x"])  # another rank of the host: the file of the hottest rows is there
    assert s3_proxy.num_bytes - before < 10_000
    assert again.read(ids, out).hits == read.hits


def test_adjacent_blocks_are_one_request(uploaded: str, tmp_path: Path, parted: Store) -> None:
    store = gsplit.open(uploaded, cache_dir=tmp_path, cache_bytes=0)
    blocks = store.open_blocks("features/x")
    assert blocks is not None and blocks.block_rows == 512
    rows = RemoteRows(blocks, (128,), torch.float32, first_id=0)
    traffic = store.mirror.objects.traffic  # type: ignore[union-attr]
    before = traffic.requests
    out = torch.zeros(4, 128)
    rows.place(np.array([3999, 513, 3, 1]), np.array([2, 0, 3, 1]), out)
    assert traffic.requests - before == 2  # blocks 0 and 1, and block 7
    np.testing.assert_array_equal(out.numpy(), parted.stored_array("features/x")[[513, 1, 3999, 3]])
    with pytest.raises(InputError, match="expected ids in 0..3999, which are held here"):
        rows.place(np.array([4000]), None, out[:1])


FAULTS = {"slow down": 0.15, "error": 0.1, "cut": 0.1}


def test_faults_are_survived(uploaded: str, s3_proxy: FaultyProxy, parted: Store, tmp_path: Path) -> None:
    s3_proxy.shares = FAULTS
    store = gsplit.open(uploaded, cache_dir=tmp_path)
    _same_arrays(store, parted)
    remote = gsplit.open(uploaded, cache_dir=tmp_path, cache_bytes=0).open_blocks("features/x")
    assert remote is not None
    for block in range(8):
        remote.read(block, block + 1)
    assert set(s3_proxy.counts) == set(FAULTS)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_server_that_stays_down_is_named_within_bounds(
    uploaded: str, s3_proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PATIENCE_S", 1.0)
    store = gsplit.open(uploaded, cache_dir=tmp_path)
    s3_proxy.shares = {"slow down": 1.0}
    with pytest.raises(UnavailableError, match=rf"{uploaded}/y.npy: expected an answer .* attempts in \d+ s"):
        store.stored_array("y")
    s3_proxy.shares = {}
    assert store.stored_array("y").size == 4000


def test_a_part_of_a_large_object_is_sent_again_and_memory_is_bounded(
    s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PATIENCE_S", 0.0)  # the object itself is not sent again
    monkeypatch.setattr(objects, "_AHEAD_BYTES", 12 << 20)
    s3_proxy.once = {"partNumber=2": "slow down"}
    folder, data = ObjectFolder(f"s3://{BUCKET}/large"), np.arange(8 << 20, dtype=np.int64)
    seen, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            seen.append(pyarrow.total_allocated_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    before = pyarrow.total_allocated_bytes()
    folder.write("x", [b"head", data.data])
    ended.set()
    thread.join()
    assert s3_proxy.once == {}
    assert folder.read_range("x", 4 + 8 * 1_234_567, 8) == (1_234_567).to_bytes(8, "little")
    assert 0 < max(seen) - before < 40 << 20  # of 64 MiB


def test_an_object_that_is_too_large_is_refused_before_anything_is_sent(
    parted: Store, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/limit.gsplit"
    ObjectFolder(url).write("manifest.json", [b"{}"])
    monkeypatch.setattr(objects, "_MOST_S3_BYTES", 1_000_000)
    with pytest.raises(InputError, match="limit.gsplit/features/x.npy: expected at most 1000000 bytes"):
        upload_store(parted, url, overwrite=True)
    assert ObjectFolder(url).list_below().keys() == {"manifest.json"}


@pytest.mark.parametrize("is_large", [False, True])
def test_objects_of_any_size_are_renamed_also_if_the_answer_is_lost(
    is_large: bool, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(objects, "_MOST_S3_COPIED_BYTES", 100)
        monkeypatch.setattr(objects, "_AHEAD_BYTES", 300)
    folder, data = ObjectFolder(f"s3://{BUCKET}/renamed-{is_large}"), bytes(range(250)) * 4
    folder.write("old", [data])
    s3_proxy.once = {"DELETE": "cut"}
    folder.rename("old", "new")
    assert s3_proxy.once == {} and folder.list() == ["new"] and folder.read("new", 1000) == data


def test_refusals_are_told_at_once(
    uploaded: str, s3_proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "ATTEMPTS", 1)  # a retry would fail this test
    with pytest.raises(StoreError, match="no-such-bucket/p.gsplit/manifest.json: expected the manifest of a store"):
        gsplit.open("s3://no-such-bucket/p.gsplit", cache_dir=tmp_path)
    with pytest.raises(StoreError, match="expected the manifest of a store .got no such object"):
        gsplit.open(f"s3://{BUCKET}/other.gsplit", cache_dir=tmp_path)
    s3_proxy.shares = {"denied": 1.0}
    with pytest.raises(StoreError, match="expected an object that may be used .*check the bucket, the credentials"):
        gsplit.open(uploaded, cache_dir=tmp_path)
    with pytest.raises(InputError, match="without credentials") as caught:
        gsplit.open("s3://key:secret@bucket/p.gsplit")
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="ftp://host/p.gsplit: expected object storage that can be used"):
        gsplit.open("ftp://host/p.gsplit", cache_dir=tmp_path)
    with pytest.raises(InputError, match="expected the URL of a store on object storage"):
        gsplit.open("p.gsplit", cache_bytes=3)


def test_a_changed_object_is_noticed(s3_proxy: FaultyProxy, parted: Store, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/changed.gsplit"
    upload_store(parted, url)
    store = gsplit.open(url, cache_dir=tmp_path, cache_bytes=0)
    blocks = store.open_blocks("features/x")
    assert blocks is not None
    folder = ObjectFolder(url)
    for name in ("features/x", "y"):
        data = bytearray((parted.path / f"{name}.npy").read_bytes())
        data[-1] ^= 1
        folder.write(f"{name}.npy", [bytes(data)])
    blocks.read(0, 7)
    with pytest.raises(StoreError, match=r"features/x.npy: expected the bytes that were uploaded, in block 7"):
        blocks.read(7, 8)
    with pytest.raises(StoreError, match=r"y.npy: expected int64 \[4000\] with SHA-256 .* replaced"):
        store.stored_array("y")
    assert not (store.mirror.folder / "y.npy").exists()  # type: ignore[union-attr]
    folder.write("y.npy", [b"short"])
    with pytest.raises(StoreError, match=r"y.npy: expected 32128 bytes .*got 5 bytes"):
        store.stored_array("y")
    folder.remove("y.npy")
    with pytest.raises(StoreError, match=r"y.npy: expected 32128 bytes .*got no such object"):
        store.stored_array("y")
    folder.write("features/x.blocks", [bytes(32 * 9)])
    with pytest.raises(StoreError, match="features/x.blocks: expected checksums of float32"):
        store.open_blocks("features/x")
    folder.remove("features/x.blocks")
    with pytest.raises(StoreError, match="x.blocks: expected checksums to read rows by .got no such object"):
        store.open_blocks("features/x")


def test_what_is_not_built_is_refused_by_name(uploaded: str, parted: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{uploaded}: expected no store at this URL .*--overwrite"):
        upload_store(parted, uploaded)
    with pytest.raises(InputError, match="URL: expected s3://BUCKET/NAME.gsplit"):
        upload_store(parted, "p.gsplit")
    with pytest.raises(StoreError, match="stores are not written to object storage .*gsplit upload"):
        write_shard(parted, f"s3://{BUCKET}/q.gsplit", 0, 10)
    store = gsplit.open(uploaded, cache_dir=tmp_path)
    with pytest.raises(StoreError, match="stores are not written to object storage"):
        gsplit.add_pairs(store, "train", np.array([[0], [1]]))


def test_a_damaged_store_is_not_uploaded(s3_proxy: FaultyProxy, parted: Store, tmp_path: Path) -> None:
    shutil.copytree(parted.path, tmp_path / "d.gsplit")
    with (tmp_path / "d.gsplit" / "y.npy").open("rb+") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(b"\x01")
    url = f"s3://{BUCKET}/d.gsplit"
    with pytest.raises(StoreError, match="y.npy: expected contents with SHA-256"):
        upload_store(gsplit.open(tmp_path / "d.gsplit"), url)
    with pytest.raises(StoreError, match="expected the manifest of a store"):
        gsplit.open(url, cache_dir=tmp_path)


def test_a_full_disk_is_named(uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = gsplit.open(uploaded, cache_dir=tmp_path)
    monkeypatch.setattr("gsplit.store.remote.open_atomic", _no_room)
    with pytest.raises(StoreError, match="y.npy: expected room for 32128 bytes .got No space left"):
        store.stored_array("y")
    monkeypatch.setattr("gsplit.store.remote.write_atomic", _no_room)
    with pytest.raises(StoreError, match="expected a folder to fetch to .got No space left"):
        gsplit.open(uploaded, cache_dir=tmp_path / "other")


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_silent_server_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ATTEMPTS", 2)
    monkeypatch.setattr(objects, "_SILENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections stay in its queue
        for name, value in s3_environment(silent.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UnavailableError, match=r"expected an answer of object storage .* 2 attempts in \d s"):
            gsplit.open(URL, cache_dir=tmp_path)


def test_rows_of_int8_are_read_with_their_scales(s3_proxy: FaultyProxy, parted: Store, tmp_path: Path) -> None:
    small = write_with_features(parted, tmp_path / "i.gsplit", "int8")
    url = f"s3://{BUCKET}/i.gsplit"
    upload_store(small, url)
    mesh = solo_mesh()
    ids = torch.arange(0, 4000, 7)
    found = []
    for store in (small, gsplit.open(url, cache_dir=tmp_path, cache_bytes=50_000)):
        out = torch.zeros(ids.numel(), 128)
        local = LocalGraph(store, mesh, make_ownership(store, mesh, None))
        open_features(local, ["x"], on_disk=True).read(ids, out)
        found.append(out)
    assert torch.equal(*found)


def test_a_device_does_not_copy_features_that_stay_on_object_storage(
    uploaded: str, parted: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def record(*args: Any, **options: Any) -> Any:
        held.append(options["held"])
        return SimpleNamespace(describe=lambda: "")

    monkeypatch.setattr("gsplit.loading.batch_loader.open_device_rows", record)
    place = torch.device("meta")
    for store in (parted, gsplit.open(uploaded, cache_dir=tmp_path, cache_bytes=1000)):
        loader = gsplit.NeighborLoader(store, [4], "train", batch_size=8, mesh=solo_mesh(), strategy="split")
        loader.mesh = SimpleNamespace(device=place, sample_device=place)  # type: ignore[assignment]
        loader._open_device_rows(loader._graph.owned, None)  # type: ignore[arg-type]
    assert held == [True, False]


@pytest.mark.parametrize("cache_bytes", [0, 200])
def test_rows_of_vertex_types_are_read_by_ranges(cache_bytes: int, s3_proxy: FaultyProxy, tmp_path: Path) -> None:
    plain = academic(edges=900).build(tmp_path / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 12, "solver": "random", "objective": "random", "epochs": 2}
    typed = gsplit.partition(plain, tmp_path / "t.gsplit", 4, [3, 2], "paper/train", **options)
    url = f"s3://{BUCKET}/typed-{cache_bytes}.gsplit"
    upload_store(typed, url)
    mesh = solo_mesh()
    remote = gsplit.open(url, cache_dir=tmp_path, cache_bytes=cache_bytes)
    assert remote.types == typed.types and remote.graph.num_edges == typed.graph.num_edges
    names = {name.split("/")[0]: [name] for name in typed.manifest.names("features")}
    assert names
    for vertex_type, rows in open_typed_features(
        LocalGraph(remote, mesh, make_ownership(remote, mesh, None)), names
    ).items():
        want = typed.stored_array(f"features/{names[vertex_type][0]}")
        out = torch.zeros(want.shape, dtype=rows.dtype)
        read = rows.read(torch.arange(want.shape[0]), out)
        np.testing.assert_array_equal(out.numpy(), want)
        assert (read.hits > 0) == (cache_bytes > 0)


def test_a_full_disk_for_the_hottest_rows_is_named(
    uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = solo_mesh()
    store = gsplit.open(uploaded, cache_dir=tmp_path, cache_bytes=50_000)
    local = LocalGraph(store, mesh, make_ownership(store, mesh, None))
    monkeypatch.setattr("gsplit.features.remote.create_mapped", _no_room)
    with pytest.raises(InputError, match="expected room for the hottest rows .got No space left"):
        open_features(local, ["x"])
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_manifest_of_any_length_and_a_missing_package_are_refused(
    uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="manifest.json: expected at most 10 bytes"):
        ObjectFolder(uploaded).read("manifest.json", 10)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(MissingDependencyError, match="object storage: expected pyarrow"):
        gsplit.open(uploaded, cache_dir=tmp_path)
