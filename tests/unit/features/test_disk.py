"""Rows read from a file are the array's rows, whoever asks and how; a bad file is an error that names it."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_sources import DTYPES, as_tensor, open_rows, stored_array, wanted_rows

from gsplit.errors import InputError, StoreError
from gsplit.features import disk
from gsplit.features.disk import DiskRows
from gsplit.features.protocol import take_rows

CPU = torch.device("cpu")


def _num_open(path: Path) -> int:
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sum(link.startswith(str(path)) for link in links)


def _reading_threads(path: Path) -> list[str]:
    return [thread.name for thread in threading.enumerate() if str(path) in thread.name]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_every_type_width_and_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype, columns = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 2, 3, 7, 64, 129, 1500]))
    threads, num_rows, first = data.draw(st.sampled_from([1, 2, 4, 16])), data.draw(st.integers(1, 400)), 50
    array = stored_array(dtype, num_rows, columns)
    rows = open_rows(tmp_path_factory.mktemp("d") / "x.npy", array, dtype, first_id=first, threads=threads)
    ids = data.draw(wanted_rows(num_rows))
    out = torch.zeros(ids.size, columns, dtype=rows.dtype)
    read = rows.read(torch.from_numpy(ids + first), out)
    assert torch.equal(out, as_tensor(array, dtype)[ids])
    assert (read.rows, read.num_bytes, read.hits) == (ids.size, out.nbytes, 0)
    rows.close()


@settings(max_examples=30, deadline=None)
@given(ids=wanted_rows(90), seed=st.integers(0, 99))
def test_rows_go_to_their_places_in_some_columns(tmp_path_factory: pytest.TempPathFactory, ids: Any, seed: int) -> None:
    array = stored_array("float32", 90, 5)
    rows = open_rows(tmp_path_factory.mktemp("d") / "x.npy", array, "float32", threads=3)
    places = np.random.default_rng(seed).permutation(ids.size + 3)[: ids.size]
    wide = torch.full((ids.size + 3, 9), -7.0)
    rows.place(ids, places, wide[:, 2:7])
    want = torch.full_like(wide, -7.0)
    want[torch.from_numpy(places), 2:7] = torch.from_numpy(array[ids])
    assert torch.equal(wide, want)
    rows.close()


def test_numbers_too_large_to_pack_are_sorted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = np.array([1 << 61, 5, 1 << 61, 0])
    assert [part.tolist() for part in disk.sort_rows(rows)] == [[0, 5, 1 << 61, 1 << 61], [3, 1, 0, 2]]
    assert [part.tolist() for part in disk.sort_rows(rows[1::2])] == [[0, 5], [1, 0]]


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    array = stored_array("float32", 5000, 16)
    rows = open_rows(tmp_path / "x.npy", array, "float32", threads=4)

    def read(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(0, 5000, 3000)
        return torch.equal(take_rows(rows, torch.from_numpy(ids), CPU), torch.from_numpy(array[ids]))

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(read, range(40)))


def test_other_vertices_are_refused(tmp_path: Path) -> None:
    rows = open_rows(tmp_path / "x.npy", stored_array("float32", 10, 3), "float32", first_id=100)
    with pytest.raises(InputError, match=r"x.npy: expected ids in 100..109, which are held here .got 99..99"):
        take_rows(rows, torch.tensor([99]), CPU)


def test_rows_without_columns(tmp_path: Path) -> None:
    rows = open_rows(tmp_path / "x.npy", np.zeros((10, 0), np.float32), "float32")
    assert take_rows(rows, torch.tensor([3, 4]), CPU).shape == (2, 0)


@pytest.mark.parametrize("ids", [[999], list(range(1000)), [0, 999]])
def test_a_file_cut_off_after_opening_is_an_error_that_names_it(ids: list[int], tmp_path: Path) -> None:
    rows = open_rows(tmp_path / "x.npy", stored_array("float32", 1000, 8), "float32", threads=4)
    whole = (tmp_path / "x.npy").stat().st_size
    os.truncate(tmp_path / "x.npy", whole - 5)
    match = rf"x.npy: expected {whole} bytes, as when it was opened .got its end at byte {whole - 5}"
    with pytest.raises(StoreError, match=match):
        take_rows(rows, torch.tensor(ids), CPU)
    assert take_rows(rows, torch.arange(900), CPU).shape == (900, 8)  # what is there can still be read


def test_an_input_output_error_names_the_file(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)  # reading a directory fails as a bad disk would
    shape: dict[str, Any] = {"offset": 0, "num_rows": 10, "row_shape": (2,), "dtype": torch.float32}
    rows = DiskRows("some/x.npy", folder, **shape)
    with pytest.raises(OSError, match=r"Is a directory: 'some/x.npy'"):
        take_rows(rows, torch.arange(10), CPU)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_short_reads_are_completed(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may read less than it was asked for; here the compiled reads fail always, and the others are short."""
    array, calls = stored_array("float32", 40, 3), []
    rows = open_rows(tmp_path / "x.npy", array, "float32", threads=2)

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        data = os.pread(file, min(at_once, buffers[0].nbytes), offset)
        buffers[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(disk, "read_rows", lambda *args: args[7])
    monkeypatch.setattr(os, "preadv", short)
    ids = torch.tensor([39, 0, 7, 7])
    assert torch.equal(take_rows(rows, ids, CPU), torch.from_numpy(array)[ids])
    assert len(calls) == 4 * -(-12 // at_once)


def test_an_error_waits_for_the_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches the error may use the buffer again at once."""
    rows = open_rows(tmp_path / "x.npy", stored_array("float32", 1000, 3), "float32", threads=4)
    busy = threading.Event()

    def read(self: DiskRows, work: Any, first: int, stop: int) -> None:
        if first == 0:
            busy.wait(300)
            raise OSError("planted")
        busy.set()
        time.sleep(0.2)
        work.flat[first] = 1
        finished.append(first)

    finished: list[int] = []
    monkeypatch.setattr(DiskRows, "_read_piece", read)
    with pytest.raises(OSError, match="planted"):
        take_rows(rows, torch.arange(1000), CPU)
    found = len(finished)
    time.sleep(0.3)
    assert found == len(finished) > 0


@pytest.mark.parametrize("how", ["close", "drop"])
def test_nothing_is_left_behind(how: str, tmp_path: Path) -> None:
    rows = open_rows(tmp_path / "x.npy", stored_array("float32", 3000, 3), "float32", threads=4)
    assert _reading_threads(tmp_path) == []  # not before they are needed
    take_rows(rows, torch.arange(3000), CPU)
    assert _num_open(tmp_path) == 1 and _reading_threads(tmp_path)
    if how == "close":
        rows.close()
        rows.close()
        with pytest.raises(AssertionError, match="has been closed"):
            take_rows(rows, torch.arange(3), CPU)
    del rows
    gc.collect()
    deadline = time.monotonic() + 300
    while _reading_threads(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (_num_open(tmp_path), _reading_threads(tmp_path)) == (0, [])
