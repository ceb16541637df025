"""The environment of a process with a device: what the user has set is kept, and code lies in private folders."""

import os
from pathlib import Path

import pytest

from gsplit.device.environment import prepare_environment

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (*ALLOCATOR, "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def _cache(folder: Path) -> Path:
    return folder / f"gsplit-triton-{os.getuid()}"


def test_nothing_is_set_and_all_is_chosen(tmp_path: Path) -> None:
    for _ in range(2):  # the folder is there the second time
        prepare_environment()
        assert [os.environ[name] for name in ALLOCATOR] == ["expandable_segments:True"] * 2
        assert os.environ.pop("TRITON_CACHE_DIR") == str(_cache(tmp_path))
        assert _cache(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ALLOCATOR)
def test_either_name_of_the_users_allocator_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    prepare_environment()
    assert {each: os.environ.get(each) for each in ALLOCATOR} == dict.fromkeys(ALLOCATOR) | {
        name: "max_split_size_mb:64"
    }


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_the_users_cache_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    prepare_environment()
    assert os.environ[name] == "mine" and os.environ.get("TRITON_CACHE_DIR", "mine") == "mine"
    assert not _cache(tmp_path).exists()


@pytest.mark.parametrize("how", ["open to others", "of another user", "a link", "a file", "no code may be loaded"])
def test_code_is_kept_nowhere_where_others_could_write(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _cache(tmp_path)
    if how == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o770 if how == "open to others" else 0o700)
    if how == "of another user":
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        folder.rename(_cache(tmp_path))
    if how == "no code may be loaded":
        found = os.statvfs(tmp_path)
        fields = [*found[:8], found.f_flag | os.ST_NOEXEC, found.f_namemax]
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    prepare_environment()
    assert "TRITON_CACHE_DIR" not in os.environ
