"""Small files from strangers: only regular ones, only so much of them, only values that can be worked with."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from fuzz_guard import limit_memory

from gsplit.errors import InputError
from gsplit.files.untrusted import MAX_DEPTH, Expected, describe_fault, open_regular, read_bounded, read_document
from gsplit.planner.hardware import read_hardware
from gsplit.report.reading import read_text
from gsplit.run.config import load_settings
from gsplit.store.writer import is_store

FILE = Expected("a thing", "bring a thing")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_bounded(tmp_path / "f", 5, FILE) == b"12345"
    with pytest.raises(InputError, match=r"f: expected at most 4 bytes .got 5.. Fix: bring a thing\."):
        read_bounded(tmp_path / "f", 4, FILE)
    with pytest.raises(InputError, match="maps: expected at most 10 bytes .got 11"):  # a size of 0, and endless
        read_bounded(Path("/proc/self/maps"), 10, FILE)
    with pytest.raises(InputError, match="mem: expected a thing .got Input/output error"):
        read_bounded(Path("/proc/self/mem"), 10, FILE)


@pytest.mark.parametrize("free", [300 << 20, 900 << 20])  # not enough for the bytes; for the bytes, not for the text
def test_a_file_that_memory_cannot_hold_is_refused(tmp_path: Path, free: int) -> None:
    (tmp_path / "history.json").touch()
    os.truncate(tmp_path / "history.json", 600 << 20)  # a hole: it takes no disk
    child = multiprocessing.get_context("fork").Process(target=_read_with_little_memory, args=(tmp_path, free))
    child.start()
    child.join(60)
    said = (tmp_path / "said").read_text()
    assert said.endswith("a thing (got 629,145,600 bytes, more than the memory left). Fix: bring a thing.")


def _read_with_little_memory(folder: Path, free: int) -> None:
    limit_memory(free)
    try:
        read_text(folder / "history.json", FILE, 1 << 30)
    except InputError as error:
        (folder / "said").write_text(str(error))


def test_what_is_no_regular_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name, what in (("pipe", "a named pipe"), ("link", "a named pipe"), (".", "a directory")):
        with pytest.raises(OSError, match=what):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="Too many levels"):
        open_regular(tmp_path / "link", follow=False)
    with pytest.raises(OSError, match="a device"):
        open_regular("/dev/zero")
    with pytest.raises(OSError, match="null"):
        open_regular("a\0b")
    with pytest.raises(InputError, match="null: expected a thing .got a device"):
        read_document(Path("/dev/null"), FILE)


def test_nesting_is_bounded() -> None:
    document: object = 1
    for _ in range(MAX_DEPTH):
        document = [document]
    assert describe_fault(document) is None
    assert describe_fault([document]) == "values nested deeper than 64 levels"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a = " + "[" * 5000, "nested too deep"),
        ("a" + ".a" * 100_000 + " = 1", "more than 128 dots on line 1"),
        ("a" + ".a" * 100 + " = 1", "nested deeper than 64 levels"),
        ("hidden = " + "9" * 5000, "Exceeds the limit"),
        ("hidden = " + "9" * 500, "a number beyond 64 bits in hidden"),
        ("lr = nan", "nan in lr"),
        ("lr = 1e300", "lr: expected less than or equal to 1000000 .got 1e.300"),
        ("model = '" + "x" * 5000 + "'", "model: expected String should have at most 1000 characters"),
        ("model = '\\u001b[31m'", "model: expected one of sage"),
        ('model = "\\u001b[31m"', r"got \\x1b\[31m"),
        ("\ufffe", "Invalid"),
    ],
)
def test_hostile_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    start = time.process_time()
    with pytest.raises(InputError, match=message) as raised:
        load_settings(tmp_path / "t.toml", {})
    assert time.process_time() - start < 5
    assert str(raised.value).isprintable() and len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"base": "a100", "flops_per_s": "fast"}', "flops_per_s: expected a number up to 1e.30 .got fast"),
        ('{"base": "a100", "flops_per_s": true}', "flops_per_s: expected a number"),
        ('{"base": "a100", "flops_per_s": 1e200}', "flops_per_s: expected a number up to"),
        ('{"base": "a100", "crowding": 1000}', "crowding: expected a number up to 10"),
        ('{"base": "a100", "cores": 1.5}', "cores: expected a whole number of cores"),
        ('{"base": "a100", "cores": 1000000000000}', "cores: expected a whole number of cores"),
        ('{"base": "a100", "name": 5}', "name: expected a name"),
        ('{"base": ["a100"]}', "got base"),
        ('{"base": "a100", "constants": [1]}', "constants of type list"),
        ("[]", "got a JSON list"),
        ('{"base": "a100", "step_s": Infinity}', "inf in step_s"),
    ],
)
def test_hostile_constants_of_a_machine_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_hardware(tmp_path / "h.json")


def test_a_pipe_for_a_manifest_does_not_hang_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_store(tmp_path)
