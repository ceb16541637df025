"""A log file keeps the newest lines, in two files of bounded size."""

import os
from pathlib import Path

import pytest

from gsplit.files.rotated import RotatedFile, older_file


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_newest_lines_are_kept_in_two_files_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for start in (0, 13):  # opened again, as by a resumed run
        file = RotatedFile(path, 100)
        for number in range(start, start + 13):
            file.write(f"{number:09}\n")
            assert path.stat().st_size <= 100
        file.close()
    assert [int(line) for line in _lines(older_file(path)) + _lines(path)] == list(range(10, 26))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["steps.jsonl", "steps.jsonl.1"]


def test_a_line_of_more_than_a_file_is_a_file(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "log", 4)
    file.write("one line\n")
    file.write("another line\n")
    file.close()
    assert (_lines(older_file(tmp_path / "log")), _lines(tmp_path / "log")) == (["one line"], ["another line"])


def test_two_writers_of_a_path_lose_no_lines(tmp_path: Path) -> None:
    first, second = (RotatedFile(tmp_path / "log", 50) for _ in range(2))
    for number in range(18):
        (first if number % 2 else second).write(f"{number:09}\n")
    first.close()
    second.close()
    assert [int(line) for line in _lines(older_file(tmp_path / "log")) + _lines(tmp_path / "log")] == list(range(18))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_not_a_regular_file_is_not_renamed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
        reader = None
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = RotatedFile(path, 4)
    for _ in range(3):
        file.write("line\n")
    file.close()
    assert not older_file(path).exists()
    if reader is not None:
        assert os.read(reader, 100) == b"line\n" * 3
        os.close(reader)
    else:
        assert _lines(path) == ["line"] * 3
