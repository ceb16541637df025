"""Loading for a device, on a simulated one: the host's bits, no waits, no races, and only what is missing crosses."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_ranks import run_compiled_ranks
from device_loading_programs import (
    Loaded,
    Trained,
    count_edge_copies,
    count_loading,
    count_registered,
    count_waits_by_thread,
    fill_the_device,
    forget_to_join,
    make_many_between_steps,
    notes_of_a_run,
    read_inputs,
    rows_read_ahead,
    sample_on_both,
    steps_before_an_error,
    train_tiers,
    with_little_memory,
)

import gsplit
from gsplit.device.devices import DEVICE_MARGIN
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import RankFailedError, run_ranks
from gsplit_bench.simulated import why_not_supported

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
TIERS: list[dict[str, Any]] = [
    {"prefetch": 0, "device_cache": 0},
    {"prefetch": 2, "sampling_threads": 2, "device_cache": "20KB"},
    {"prefetch": 1, "device_cache": "1GB"},
    {"prefetch": 3, "sampling_threads": 3, "device_cache": "20KB", "cache": "20KB", "features_on_disk": True},
]
COPIES: dict[str, Any] = {"prefetch": 2, "device_cache": "10KB", "copies": "10KB"}


def _partitioned(folder: Path, graph: PlantedGraph) -> str:
    raw = build_store(synthetic_source(graph), folder / "raw.gsplit")
    gsplit.partition(raw, folder / "parts.gsplit", parts=4, num_neighbors=[4, 4], batch_size=100, epochs=2)
    return str(folder / "parts.gsplit")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _partitioned(tmp_path_factory.mktemp("devices"), PlantedGraph(1300, 13_000, num_features=24, num_classes=4))


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For kernels that are executed instruction by instruction."""
    return _partitioned(tmp_path_factory.mktemp("compiled"), PlantedGraph(400, 2000, num_features=24, num_classes=4))


# every change: one rank, and exchanges of rows on devices in test_simulated_device
@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.weekly)])
def test_tiers_and_depths_train_as_on_the_host(store: str, num_ranks: int) -> None:
    host = run_ranks(train_tiers, num_ranks, store, TIERS[:1])
    assert len(host[0][0][0]) > 4
    cases = [*TIERS, COPIES, {}]
    there = run_ranks(train_tiers, num_ranks, store, cases, device="sim:0")
    for rank in range(num_ranks):
        for options, found in zip(cases, there[rank], strict=True):
            assert found == there[rank][0], options  # to the bit
        assert_close(there[rank][0], host[rank][0])


@pytest.mark.parametrize("num_ranks, replicas", [(1, 1), (2, 1), pytest.param(4, 2, marks=pytest.mark.weekly)])
def test_a_device_that_samples_trains_as_one_that_the_host_samples_for(
    store: str, num_ranks: int, replicas: int
) -> None:
    cases = [{key: value for key, value in case.items() if key != "sampling_threads"} for case in [*TIERS, COPIES, {}]]
    cases = [cases[place] for place in ((0, 1, 3, 5) if num_ranks == 1 else (1, 4))]
    host = run_ranks(train_tiers, num_ranks, store, TIERS[:1], device="sim:0", replicas=replicas)
    there = run_ranks(train_tiers, num_ranks, store, cases, device="sim:0", sample_device="sim:0", replicas=replicas)
    for rank in range(num_ranks):
        for options, found in zip(cases, there[rank], strict=True):
            assert found == host[rank][0], options  # to the bit


def test_only_the_loaders_thread_waits_for_a_device_that_samples(store: str) -> None:
    for steps, waits in run_ranks(count_waits_by_thread, 2, store, device="sim:0", sample_device="sim:0"):
        assert waits.pop("gsplit-loader") > steps
        assert set(waits) <= {"MainThread"} and sum(waits.values()) <= steps + 1, waits  # for losses


def assert_close(found: Trained, wanted: Trained) -> None:
    """Equal to rounding: on devices sums run in another order. Adam divides by the roots of gradients."""
    for one, two in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(one, two, rtol=0.0, atol=1e-9)


def test_making_a_batch_waits_for_nothing_and_only_what_is_missing_crosses(store: str) -> None:
    ranks: list[list[Loaded]] = run_ranks(count_loading, 2, store, [*TIERS, COPIES, {}], device="sim:0")
    for *found, with_copies, by_default in ranks:
        assert by_default.hits == by_default.rows  # as many rows as fit: all
        assert with_copies.waits == 0 and with_copies.launches <= 8, with_copies
        for loaded in found:
            assert loaded.waits == 0 and loaded.launches <= 5, loaded
            where = 8 * (loaded.rows + loaded.hits) if loaded.hits else 0  # of every row, and of hits in the cache
            needed = loaded.index_bytes + where + loaded.missed_bytes
            assert needed <= loaded.copied_bytes <= 1.02 * needed, loaded  # tensors begin at multiples of 64 bytes
        none, some, everything, _ = found
        assert none.hits == 0 < some.hits < some.rows == everything.hits
        assert none.missed_bytes > some.missed_bytes > everything.missed_bytes == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_rows_in_registered_memory_are_gathered_by_one_kernel(small_store: str) -> None:
    cases = [{"prefetch": 0, "device_cache": "8KB"}, {"prefetch": 2, "device_cache": "8KB"}]
    host = run_ranks(train_tiers, 2, small_store, cases[:1])
    there = run_compiled_ranks(train_tiers, 2, small_store, cases)
    counted = run_compiled_ranks(count_loading, 2, small_store, cases[:1])
    registered = run_compiled_ranks(count_registered, 2, small_store, [{"device_cache": "8KB"}, {}])
    kept = [{"prefetch": 2, "device_cache": "8KB"}, {"prefetch": 2, "device_cache": "8KB", "cache": "8KB"}]
    ahead = run_compiled_ranks(rows_read_ahead, 2, small_store, kept)
    for rank in range(2):
        assert there[rank][0] == there[rank][1]
        assert_close(there[rank][0], host[rank][0])
        some, none = registered[rank]
        assert some.is_shared and none.is_shared and none.num_bytes == 0
        assert some.num_bytes == some.num_rows * 24 * 4  # one copy for two loaders
        hottest = 8000 // (24 * 4)
        assert ahead[rank] == [[some.num_rows], [hottest]]  # and the comparison of the first step keeps none
        (loaded,) = counted[rank]
        assert loaded.waits == 0 and loaded.launches <= 4
        assert 0 < loaded.hits < loaded.rows
        needed = loaded.index_bytes + 8 * loaded.rows  # and a position for every row; rows cross by themselves
        assert needed <= loaded.copied_bytes <= 1.02 * needed + 1000  # tensors begin at whole lines of memory
        assert loaded.missed_bytes == (loaded.rows - loaded.hits) * 24 * 4


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_device_that_samples_waits_twice_per_layer_and_once_more(store: str) -> None:
    cached = {"device_cache": "20KB"}
    cases: list[tuple[list[int], dict[str, Any], int]] = [
        ([3, 2], cached, 1 << 30),
        ([2, 2, 2], {}, 8000),  # of some 26,000 bytes of edges; the others are in registered memory
        ([3, -1], cached, 0),
    ]
    found = [run_compiled_ranks(sample_on_both, 2, store, *case, sample_device="sim:0") for case in cases]
    for (fanouts, _, _), ranks in zip(cases, found, strict=True):
        batches = [batch for rank in ranks for batch in rank]
        assert len(batches) == 6 and all(batch.is_equal for batch in batches)
        assert all(0 < batch.hits <= batch.rows for batch in batches)
        most = 2 * len(fanouts) + 1 + fanouts.count(-1)  # the number of all neighbours is not known before
        assert max(sum(batch.waits.values()) for batch in batches) == most, (fanouts, batches[0].waits)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_samplers_of_a_device_share_its_edges(small_store: str) -> None:
    assert run_compiled_ranks(count_edge_copies, 2, small_store, sample_device="sim:0") == [1, 1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_int8_rows_stay_int8_until_the_device_gathers_them(small_store: str, tmp_path: Path) -> None:
    """The bits of the host, and a quarter of the registered memory."""
    made = str(write_with_features(gsplit.open(small_store), tmp_path / "int8.gsplit", "int8").path)
    cases: list[dict[str, Any]] = [{"device_cache": "4KB"}, {"device_cache": 0}]
    host = run_ranks(read_inputs, 2, made, [{}])
    registered = run_compiled_ranks(read_inputs, 2, made, cases)
    memory = run_compiled_ranks(count_registered, 2, made, cases[:1])
    staged = run_ranks(read_inputs, 2, made, cases, device="sim:0")
    for rank in range(2):
        assert host[rank] * len(cases) == registered[rank] == staged[rank]
        assert memory[rank][0].num_bytes == memory[rank][0].num_rows * 24


@pytest.mark.parametrize("sample_device", ["cpu", "sim:0"])
def test_a_batch_that_nobody_has_waited_for_is_found(store: str, sample_device: str) -> None:
    with pytest.raises(RankFailedError, match="RaceError.*nothing orders them"):
        run_ranks(forget_to_join, 1, store, device="sim:0", sample_device=sample_device)


def test_a_run_shows_how_batches_come_to_the_device(small_store: str) -> None:
    (shown,) = run_ranks(notes_of_a_run, 1, small_store, device="sim:0")
    (note,) = [text for text in shown if text.startswith("sim:0: ")]
    assert "400 of 400 rows" in note and "as much as fits" in note and "the host samples, 2 batches ahead" in note


def test_batches_made_by_name_never_overwrite_those_made_ahead(store: str) -> None:
    for right in run_ranks(make_many_between_steps, 2, store, device="sim:0"):
        assert len(right) > 4 and all(right), right


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_is_raised_in_the_turn_of_its_step(store: str, prefetch: int) -> None:
    ((steps, said),) = run_ranks(steps_before_an_error, 1, store, prefetch, device="sim:0")
    assert steps == [0, 1, 2] and "Input/output error" in said


def test_a_device_cache_that_does_not_fit_is_refused(store: str) -> None:
    """The rows need 124800 bytes on the one rank; the device has 100000, which is enough for a smaller cache."""
    (said,) = run_ranks(with_little_memory, 1, store, 100_000, ["20KB", "1GB"], device="sim:0")
    assert said["20KB"] == "[5, 5]"
    assert "device_cache: expected 124800 bytes of free memory of sim:0" in said["1GB"]
    assert "simulated device out of memory. Tried to allocate" in said["1GB"]


@pytest.mark.parametrize(
    "num_ranks, replicas, hosts, num_communicators", [(2, 1, (), 1), (4, 2, (), 2), (4, 1, (2, 2), 3)]
)
def test_communicators_take_their_memory_before_rows_fill_the_rest(
    store: str, num_ranks: int, replicas: int, hosts: tuple[int, ...], num_communicators: int
) -> None:
    """One for all that crosses between devices; more only for other sets of ranks."""
    sizes = (3_280_000_000, num_communicators, 30_000)  # as measured on eight H100
    ranks = run_ranks(fill_the_device, num_ranks, store, *sizes, device="sim:0", replicas=replicas, hosts=hosts)
    for found in ranks:
        assert found.opened == found.after_training == num_communicators
        assert 20_000 < found.cache_bytes <= 31_000 and found.free_bytes > DEVICE_MARGIN - 10**6


def test_a_device_cache_without_a_device_is_refused(store: str) -> None:
    with pytest.raises(ValueError, match="device_cache: expected a model on a device .got 1MB"):
        gsplit.NeighborLoader(gsplit.open(store), [2], "train", device_cache="1MB")


def test_the_store_has_hotness(store: str) -> None:
    assert Path(store).is_dir() and np.diff(gsplit.open(store).stored_array("hotness")).any()
