"""Maps: room is reserved before they are written, a file that shrinks is named, and SIGBUS has a last word."""

import errno
import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import sample_store
from small_disk import small_disk
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.errors import StoreError
from gsplit.features.sources import MappedRows
from gsplit.mapped_files import check_files, create_mapped, files_behind, flush, reserve, temporary_mapped
from gsplit.store.files import npy_header
from gsplit.store.reader import open_store

TRUNCATED = """
import os, sys
from pathlib import Path
from gsplit.store.reader import open_store
store = open_store(sys.argv[1])
os.truncate(Path(sys.argv[1]) / "features" / "x.npy", 128)
print(store.stored_array("features/x")[-1])
"""
HOLE = """
import sys
import weakref
from pathlib import Path
from gsplit.mapped_files import map_file
with open(sys.argv[1], "xb+") as file:
    file.truncate(8 << 20)  # a hole, for which there is no room
    buffer = map_file(file.fileno(), 8 << 20, Path(sys.argv[1]), writable=True)
buffer[:] = bytes(8 << 20)
"""


def _die(program: str, argument: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(argument)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGBUS, done.stderr
    return done.stderr


def test_rows_of_a_file_that_was_cut_off_are_an_error(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "s.gsplit", 300, 3000)
    rows = MappedRows("features/x", store.stored_array("features/x"), torch.float32, 0)
    out = torch.empty(1, store.num_features)
    rows.read(torch.tensor([299]), out)
    file = tmp_path / "s.gsplit" / "features" / "x.npy"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    message = f"x.npy: expected {size} bytes, as when it was opened .got {size - 1} bytes.. Fix: restore"
    with pytest.raises(StoreError, match=message):
        rows.read(torch.tensor([299]), out)


@pytest.mark.parametrize("name", ["indptr", "indices", "features/x"])
def test_a_loader_notices_a_file_that_was_cut_off(tmp_path: Path, name: str) -> None:
    sample_store(tmp_path / "s.gsplit", 300, 3000)
    batches = iter(gsplit.NeighborLoader(gsplit.open(tmp_path / "s.gsplit"), [4, 4], "train", batch_size=8))
    next(batches)
    os.truncate(tmp_path / "s.gsplit" / f"{name}.npy", 128)
    with pytest.raises(StoreError, match=f"{name}.npy: expected .* bytes, as when it was opened"):
        next(batches)


def test_the_last_word_before_sigbus_names_the_file(tmp_path: Path) -> None:
    sample_store(tmp_path / "s.gsplit", 300, 3000)
    said = _die(TRUNCATED, tmp_path / "s.gsplit")
    assert "SIGBUS: " in said and f"{tmp_path}/s.gsplit/features/x.npy: expected" in said and "got 128 bytes" in said


def test_a_disk_that_fills_up_under_a_map_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        said = _die(HOLE, disk / "map")
    assert "the disk fails or is full" in said and str(tmp_path / "disk") in said


def test_a_full_disk_shows_before_anything_is_mapped(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with pytest.raises(OSError, match="No space left on device: .* bytes wanted") as raised:
            create_mapped(disk / "a.npy", np.float32, (1 << 20,), b"")
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(disk / "a.npy"))
        with pytest.raises(OSError, match=r"disk/.rows of conv1.") as raised:
            temporary_mapped(disk, "rows of conv1", np.float32, (1 << 20,))
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize("full", ["workspace", "out"])
def test_inference_on_a_full_disk_is_an_error(tmp_path: Path, full: str) -> None:
    store = sample_store(tmp_path / "s.gsplit", 3000, 9000)
    model = gsplit.parallelize(GraphSAGE(store.num_features, 256, 2, 64), gsplit.init("cpu"))
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        places = {"workspace": tmp_path, "out": tmp_path} | {full: disk}
        said = {
            "workspace": "workspace .*bytes for rows of convs.0-out .*--workspace FOLDER",
            "out": "room for all rows",
        }
        with pytest.raises(gsplit.InputError, match=said[full]) as raised:
            gsplit.infer(model, store, places["out"] / "out.npy", workspace=places["workspace"])
        assert str(disk) in str(raised.value)
        assert list(disk.iterdir()) == []  # nothing is left of what could not be written


def test_maps_hold_what_is_written_and_are_forgotten(tmp_path: Path) -> None:
    array = create_mapped(tmp_path / "a.npy", np.int32, (3, 2), npy_header("int32", (3, 2)))
    array[:] = np.arange(6).reshape(3, 2)
    flush(array)
    assert np.load(tmp_path / "a.npy").tolist() == [[0, 1], [2, 3], [4, 5]]
    files = files_behind(array, array[1:], np.empty(3))
    assert [file.path for file in files] == [tmp_path / "a.npy"]
    check_files(files)
    assert create_mapped(tmp_path / "b.npy", np.int32, (0, 2), npy_header("int32", (0, 2))).shape == (0, 2)
    assert temporary_mapped(None, "nothing", np.int32, (0,)).shape == (0,)
    with (tmp_path / "c").open("xb") as stream:
        reserve(stream.fileno(), 0, tmp_path / "c")
    forgotten = weakref.ref(files[0].buffer)
    del files, array
    gc.collect()
    assert forgotten() is None


def test_a_store_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    sample_store(tmp_path / "s.gsplit", 300, 3000)
    store = open_store(tmp_path / "s.gsplit")
    rows = MappedRows("features/x", store.stored_array("features/x"), torch.float32, 0)
    (tmp_path / "s.gsplit").rename(tmp_path / "old")
    sample_store(tmp_path / "s.gsplit", 20, 30)  # shorter files under the same names
    assert rows.read(torch.tensor([299]), torch.empty(1, store.num_features)).rows == 1
