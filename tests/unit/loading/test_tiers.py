"""Opening a rank's features: budgets are kept, what cannot be is refused, nothing of the size of the graph is held."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import sample_store, source_of
from rank_programs import Case, store_of

import gsplit
from gsplit.device.devices import DEVICE_MARGIN
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, StoreError
from gsplit.features.cache import CachedRows, cached_order
from gsplit.features.device import StagedRows
from gsplit.features.protocol import take_rows
from gsplit.features.sources import ScaledRows
from gsplit.graph.ownership import Ownership
from gsplit.loading.tiers import _identify, open_device_rows, open_features
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.store.build import build_store
from gsplit.store.feature_types import feature_values, write_with_features
from gsplit.store.reader import Store
from gsplit.store.source import stream_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("tiers")
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 400, 4000), rng.integers(0, 400, 4000)
    features = {name: stream_rows(rng.normal(size=(400, 6)).astype(np.float32), "float32") for name in ("x", "z")}
    source = source_of(400, src, dst, features=features, targets={"train": np.arange(0, 400, 2)})
    plain = build_store(source, folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 5, [3, 3], batch_size=20, epochs=2)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("cache", [0, 24, 1000, "1kB", 10**9])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_and_budget(dtype: str, cache: int | str, on_disk: bool, parted: Store, tmp_path: Path) -> None:
    store = parted if dtype == "float32" else write_with_features(parted, tmp_path / "c.gsplit", dtype)
    rows = open_features(LocalGraph(store, solo_mesh(), Ownership((0, 400))), ["x"], cache=cache, on_disk=on_disk)
    ids = np.random.default_rng(1).integers(0, 400, 300)
    want = feature_values(store, "x", slice(0, 400))[ids]
    assert np.array_equal(take_rows(rows, torch.from_numpy(ids), CPU).numpy(), want)
    if cache:
        inner = rows._source if isinstance(rows, ScaledRows) else rows
        assert isinstance(inner, CachedRows)
        row_bytes = 24 if dtype == "float32" else 6
        budget = {"1kB": 1000}.get(str(cache), cache)
        assert isinstance(budget, int)
        assert inner.num_bytes == min(budget // row_bytes, 400) * row_bytes


def test_several_arrays_share_the_budget(parted: Store) -> None:
    one, two = (cached_order(parted, 0, 400, names, 960) for names in (["x"], ["x", "z"]))
    assert (one.num_cached, two.num_cached) == (40, 20)
    hotness = np.asarray(parted.stored_array("hotness"))
    ids = two.ids(0, 20)
    assert hotness[ids].sum() == np.sort(hotness)[-20:].sum()


def test_a_range_may_cut_a_part(parted: Store) -> None:
    cuts = parted.part_boundaries
    first, stop = cuts[1] + 3, cuts[3] - 1
    order = cached_order(parted, first, stop, ["x"], 240)
    assert order.part_boundaries == (first, cuts[2], stop)
    hotness = np.asarray(parted.stored_array("hotness"))
    assert hotness[order.ids(0, 10)].sum() == np.sort(hotness[first:stop])[-10:].sum()


def test_a_cache_needs_a_partition(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    with pytest.raises(InputError, match=r"expected a partitioned store.*Fix: run gsplit partition"):
        gsplit.NeighborLoader(store, [2], "train", cache=1)


def test_a_graph_in_memory_has_no_file() -> None:
    case = Case(0, 10, np.array([0]), np.array([1]), (0, 10), [2], np.arange(4))
    with pytest.raises(InputError, match=r"features_on_disk: expected a store on disk .got a graph in memory"):
        gsplit.NeighborLoader(store_of(case), [2], "train", features_on_disk=True)


def test_names_that_are_not_there(parted: Store) -> None:
    with pytest.raises(
        InputError, match=r"expected one of the features it has, features/x, features/z .got features/q"
    ):
        gsplit.NeighborLoader(parted, [2], "train", features=["x", "q"])


def test_another_store_in_its_place_is_noticed(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    shutil.rmtree(store.path)
    sample_store(tmp_path / "g.gsplit", seed=1)
    with pytest.raises(StoreError, match=r"features/x.npy: expected float32 .*, as when the store was opened .got "):
        gsplit.NeighborLoader(store, [2], "train", features_on_disk=True)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, opened = sample_store(tmp_path / "g.gsplit"), os.open

    def refuse(path: str, *args: int, **options: int) -> int:  # whoever runs tests as root may open everything
        if path == "x.npy":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=r"g.gsplit: features/x.npy: expected .* .got Permission denied"):
        gsplit.NeighborLoader(store, [2], "train", features_on_disk=True)


def test_a_store_cut_off_in_mid_epoch_is_an_error(tmp_path: Path) -> None:
    """The same through a memory map would be SIGBUS: the end of the process, without a word."""
    store = sample_store(tmp_path / "g.gsplit", n=3000, e=9000)
    loader = gsplit.NeighborLoader(store, [3], "train", batch_size=200, features_on_disk=True)
    batches = iter(loader)
    next(batches)
    os.truncate(store.path / "features" / "x.npy", 4096)
    with pytest.raises(StoreError, match=r"g.gsplit/features/x.npy: expected 60128 bytes, as when it was opened"):
        list(batches)


def test_hits_are_counted(parted: Store) -> None:
    loader = gsplit.NeighborLoader(parted, [3, 3], "train", batch_size=20, cache=24 * 80)
    rows = [batch.n_id.numel() for batch in loader]
    counts = [record.counts for record in loader.telemetry.records]
    assert [count["rows_loaded"] for count in counts] == rows
    assert 80 / 400 * sum(rows) < sum(count["cache_hits"] for count in counts) < sum(rows)  # better than any 80 rows


def test_scales_that_are_cut_off_are_an_error_and_not_the_end_of_the_process(parted: Store, tmp_path: Path) -> None:
    store = write_with_features(parted, tmp_path / "c.gsplit", "int8")
    os.truncate(store.path / "scales" / "x.npy", 900)
    local = LocalGraph(store, solo_mesh(), Ownership((0, 400)))
    with pytest.raises(StoreError, match=r"scales/x.npy: expected 1728 bytes for float32 .400.* .got 900 bytes"):
        open_features(local, ["x"], on_disk=True)


def test_an_array_file_that_is_cut_off_while_it_is_read_is_an_error(parted: Store, tmp_path: Path) -> None:
    shutil.copytree(parted.path, tmp_path / "p.gsplit")
    store = gsplit.open(tmp_path / "p.gsplit")
    file = store.open_file("hotness")
    assert file.read(3, 400).tolist() == store.stored_array("hotness")[3:].tolist()
    os.truncate(store.path / "hotness.npy", 1000)
    with pytest.raises(StoreError, match=r"hotness.npy: expected \d+ bytes, as when it was opened"):
        file.read(3, 400)
    file.close()


def test_rows_are_shared_only_if_path_parts_and_checksums_are_equal(parted: Store, tmp_path: Path) -> None:
    other = write_with_features(parted, tmp_path / "c.gsplit", "int8")
    assert _identify(parted, ["x"]) == _identify(gsplit.open(parted.path), ["x"])
    assert _identify(parted, ["x"])[1:] != _identify(other, ["x"])[1:]  # the same graph with other rows
    assert _identify(parted, ["x"]) != _identify(parted, ["z"])


@pytest.mark.parametrize("free, cached", [(DEVICE_MARGIN + 480, 20), (DEVICE_MARGIN - 1, 0), (80 * 10**9, 400)])
def test_an_automatic_device_cache_leaves_a_margin(
    free: int, cached: int, parted: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gsplit.loading.tiers.free_memory", lambda device: free)
    local = LocalGraph(parted, solo_mesh(), Ownership((0, 400)))
    there = open_device_rows(local, open_features(local, ["x"]), CPU, ["x"], cache=None, held=True)
    assert isinstance(there, StagedRows)
    assert (0 if there._cached is None else there._cached[1].num_cached) == cached
    assert there.describe().startswith(f"{cached} of 400 rows" if cached else "the host reads all rows")


@pytest.mark.parametrize(
    "dtype, names, cached", [("float32", ["x"], 20), ("int8", ["x"], 80), ("float32", ["x", "z"], 10)]
)
def test_a_device_cache_keeps_its_budget_in_the_rows_that_the_device_holds(
    dtype: str, names: list[str], cached: int, parted: Store, tmp_path: Path
) -> None:
    """int8 rows are int8 there too, and become float32 when they are gathered."""
    store = parted if dtype == "float32" else write_with_features(parted, tmp_path / "c.gsplit", dtype)
    local = LocalGraph(store, solo_mesh(), Ownership((0, 400)))
    rows = open_features(local, names)
    there = open_device_rows(local, rows, CPU, ["x"], cache=480, held=True)
    assert isinstance(there, StagedRows) and there._cached is not None
    held, order = there._cached
    assert held.nbytes == 480 and order.num_cached == cached
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 400, 300))
    out, (located, read) = torch.empty(300, *rows.row_shape, dtype=rows.dtype), there.locate(ids)
    there.gather(located, out)
    assert torch.equal(out, take_rows(rows, ids, CPU)) and 0 < read.hits < 300
