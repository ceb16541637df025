"""Checkpoints of a folder: the latest, what is kept, what is damaged, and what another training is told."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from forked_scripts import start_forked

from gsplit.errors import InputError
from gsplit.training.checkpoints import files
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter, read_checkpoint, read_latest
from gsplit.training.checkpoints.names import checkpoint_path, latest_file, list_checkpoints, set_newer_aside
from gsplit.training.checkpoints.tensor_file import write_tensor_file

MANIFEST = CheckpointManifest({"seed": "0", "batch_size": "16"}, {"ranks": "2"})


def _save(folder: Path, *steps: int, best: int | None = None, keep: int = 2) -> None:
    writer = CheckpointWriter(folder, keep)
    for step in steps:
        writer.save(step, {"w": torch.full((3,), step), "step": step}, MANIFEST, best)
    writer.finish()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    assert latest_file(tmp_path / "none") is None
    _save(tmp_path, 5, 10, 15, 100_000_000, best=5)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-100000000.safetensors",
        "step-00000015.safetensors",
        "step-00000005.safetensors",
    ]
    latest = latest_file(tmp_path)
    assert latest == checkpoint_path(tmp_path, 100_000_000)
    found = read_checkpoint(latest)
    assert found.state["step"] == 100_000_000 and found.state["w"].tolist() == [100_000_000] * 3
    assert found.manifest == MANIFEST


def test_what_was_just_written_stays_also_where_newer_ones_are(tmp_path: Path) -> None:
    _save(tmp_path, 8, 9)
    _save(tmp_path, 1, 2, 3, keep=1)
    assert [path.name[5:13] for path in list_checkpoints(tmp_path)] == ["00000009", "00000008", "00000003"]


def test_a_state_is_saved_as_it_was_when_save_was_called(tmp_path: Path) -> None:
    writer, weight = CheckpointWriter(tmp_path, 1), torch.zeros(1 << 18)
    for step in range(1, 4):
        weight.fill_(step)
        writer.save(step, {"w": weight}, MANIFEST)
        weight.fill_(-1.0)  # training goes on
    writer.finish()
    assert read_latest(tmp_path).state["w"].unique().tolist() == [3.0]


def test_one_thread_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for every save would have to be started without free memory, too, and ``Thread.start`` hangs then."""
    threads: list[int] = []
    monkeypatch.setattr(files, "write_checkpoint", lambda *arguments: threads.append(threading.get_ident()))
    _save(tmp_path, 1, 2, 3)
    assert len(threads) == 3 and len({*threads, threading.get_ident()}) == 2


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(tmp_path: Path) -> None:
    _save(tmp_path, 5, 10)
    newest = checkpoint_path(tmp_path, 10)
    newest.write_bytes(newest.read_bytes()[:-1])
    found = read_latest(tmp_path)
    assert found.path == checkpoint_path(tmp_path, 5)
    assert len(found.damaged) == 1 and "step-00000010.safetensors: expected tensors" in found.damaged[0]
    set_newer_aside(tmp_path, 5)
    assert list_checkpoints(tmp_path) == [found.path]
    found.path.write_bytes(b"")
    with pytest.raises(InputError, match="expected a checkpoint that can be read .got .*step-00000005"):
        read_latest(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensor_file(path, {}, {"format": "another"})
    with pytest.raises(InputError, match="a: expected gsplit checkpoint 1 .got another"):
        read_checkpoint(path)
    for manifest, state in (("{}", "{}"), ('{"fixed": {"a": 1}, "free": {}}', "{}"), ("[", "{}")):
        write_tensor_file(path, {}, {"format": "gsplit checkpoint 1", "manifest": manifest, "state": state})
        with pytest.raises(InputError, match="a: expected a state and its manifest"):
            read_checkpoint(path)


def test_errors_of_the_thread_are_logged_and_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = CheckpointWriter(tmp_path / "c", 2)
    writer.save(1, {}, MANIFEST)
    writer.finish()
    (tmp_path / "c" / "step-00000002.safetensors").mkdir()  # in the way of the next one
    writer.save(2, {}, MANIFEST)
    with pytest.raises(OSError):
        writer.finish()
    writer.finish()  # said once
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "not saved" in caplog.text and "step-00000002.safetensors: IsADirectoryError" in caplog.text
    (tmp_path / "c" / "step-00000002.safetensors").rmdir()
    assert read_latest(tmp_path / "c").path.name == "step-00000001.safetensors"
    with pytest.raises(InputError, match="keep: expected at least 1"):
        CheckpointWriter(tmp_path / "c", 0)


def test_differences_are_listed() -> None:
    MANIFEST.compare(CheckpointManifest(MANIFEST.fixed, {"ranks": "4"}), "here")
    with pytest.raises(
        InputError, match="here: expected the same training .got seed 1 instead of 0; lr 2 instead of no"
    ):
        MANIFEST.compare(CheckpointManifest({"seed": "1", "batch_size": "16", "lr": "2"}), "here")
    with pytest.raises(InputError, match="seed not set instead of 0.* 3 more"):
        CheckpointManifest({"seed": "0", **{str(n): "" for n in range(10)}}).compare(CheckpointManifest({}), "here")


SAVER = """
import sys, torch
from pathlib import Path
from gsplit.training.checkpoints import files
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]), 2)
for step in range(1, 1_000_000):
    writer.save(step, {"w": torch.full((1 << 18,), float(step))}, CheckpointManifest({}))
"""


def test_one_process_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    """The writers of a process share the lock; it ends with the last of them, or with the process."""
    folder = tmp_path / "c"
    writers = [CheckpointWriter(folder, 2), CheckpointWriter(folder, 2)]
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    for _ in range(2):
        other = start_forked([str(script), str(folder)], tmp_path)
        other.wait()
        assert "expected a folder that no other training writes to (got one locked by process" in other.err.read_text()
        writers.pop(0)
        for writer in writers:
            writer.save(1, {}, MANIFEST)
            writer.finish()
            del writer
    other = start_forked([str(script), str(folder)], tmp_path)
    deadline = time.monotonic() + 300
    while len(list_checkpoints(folder)) < 2:
        assert time.monotonic() < deadline and other.process.is_alive(), other.err.read_text()
    with pytest.raises(InputError, match="expected a folder that no other training writes to"):
        CheckpointWriter(folder, 2)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    CheckpointWriter(folder, 2)


def test_a_kill_while_writing_never_costs_the_latest(tmp_path: Path) -> None:
    """python -m gsplit_bench resume does this fifty times."""
    last, script = 0, tmp_path / "saver.py"
    script.write_text(SAVER)
    for _ in range(3):
        started = start_forked([str(script), str(tmp_path)], tmp_path)
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*.tmp")) or len(list_checkpoints(tmp_path)) < 2:
            assert time.monotonic() < deadline and started.process.is_alive(), started.err.read_text()
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        found = read_latest(tmp_path)
        number = int(found.path.name[5:13])
        assert found.damaged == () and found.state["w"].unique().tolist() == [number]
        last = max(last, number)
    CheckpointWriter(tmp_path, 2)
    assert not list(tmp_path.glob("*.tmp")) and last >= 2
