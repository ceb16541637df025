"""Atomic files and folders, and locks: a failure leaves what was there before."""

import os
from pathlib import Path

import pytest

from gsplit.files.atomic import (
    lock_folder,
    locked,
    open_atomic,
    open_lock,
    remove_abandoned,
    replace_folder,
    try_lock,
    write_atomic,
)


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, [b"one", memoryview(b"two")])
    assert path.read_bytes() == b"onetwo"
    with pytest.raises(ZeroDivisionError):
        write_atomic(path, (bytes(1 // number) for number in (1, 0)))
    assert path.read_bytes() == b"onetwo" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open_atomic(path) as first:
        first.write(b"A" * 100)
        with open_atomic(path) as second:
            second.write(b"B" * 10)
        assert path.read_bytes() == b"B" * 10
    assert path.read_bytes() == b"A" * 100 and list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.0123abcd.tmp").touch()
    (tmp_path / "b.0123abcd.tmp").touch()
    (tmp_path / "a.tmp").touch()  # not one of ours
    with open_atomic(tmp_path / "a") as living:
        remove_abandoned(tmp_path, lambda name: name == "a")
        living.write(b"1")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.tmp", "b.0123abcd.tmp"}


def test_a_locked_file_of_the_user_keeps_its_contents(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    descriptor = lock_folder(tmp_path, "wait")
    assert descriptor is not None and (tmp_path / "lock").read_text() == "mine"
    os.close(descriptor)


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    for name in ("a", "a.0123abcd.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "a", [b"new"])
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_text() == "new"
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        open_lock(tmp_path / "lock")


def _folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_a_folder_replaces_another_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert replace_folder(_folder(tmp_path / "new", "1"), path) is None
    replaced = replace_folder(_folder(tmp_path / "new", "2"), path)
    assert replaced is not None and replaced.name.startswith(".a.tmp-")
    assert (path / "file").read_text() == "2" and (replaced / "file").read_text() == "1"
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", path)
    assert (path / "file").read_text() == "2" and sorted(tmp_path.iterdir()) == sorted([path, replaced])


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    first, second = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    assert try_lock(first) and try_lock(second) is False
    os.close(first)
    assert try_lock(second)
    os.close(second)
    with locked(tmp_path), locked(tmp_path / "lock"):
        folder = os.open(tmp_path, os.O_RDONLY)
        assert try_lock(folder) is False
    assert try_lock(folder)
    os.close(folder)
