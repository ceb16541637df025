"""A store exists whole or not at all, whatever happens to its writer."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from forked_scripts import run_forked, start_forked
from graphs import sample_store, source_of

from gsplit.errors import StoreError
from gsplit.store.build import build_store
from gsplit.store.reader import open_store
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter, work_folder


def _listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with StoreWriter(tmp_path / "g.gsplit") as writer:
            writer.write("indptr", "int64", np.zeros(1))
            writer.place("features/x", "float32", (4, 2))[0] = 1
            (writer.spill_directory / "left").write_text("x")
            assert len(_listing(tmp_path)) == 1
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert _listing(tmp_path) == []


def test_existing_things_are_not_overwritten(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    with pytest.raises(StoreError, match=r"expected no file or directory of this name .*Fix: choose another name"):
        sample_store(tmp_path / "g.gsplit")
    (tmp_path / "notes.gsplit").mkdir()
    empty = np.empty(0, np.int64)
    with pytest.raises(StoreError, match="replaces stores only"):
        build_store(source_of(1, empty, empty), tmp_path / "notes.gsplit", overwrite=True)
    build_store(source_of(1, empty, empty), store.path, overwrite=True)
    assert open_store(store.path).num_vertices == 1
    assert _listing(tmp_path) == ["g.gsplit", "notes.gsplit"]
    with pytest.raises(StoreError, match=r"expected NAME.gsplit"):
        sample_store(tmp_path / "g")


def test_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    (tmp_path / ".g.gsplit.tmp-deaddead").mkdir()
    (tmp_path / ".g.gsplit.tmp-deaddead" / "lock").touch()
    (tmp_path / ".g.gsplit.tmp-0123abcd").mkdir()
    (tmp_path / ".other.gsplit.tmp-deaddead").mkdir()
    with StoreWriter(tmp_path / "g.gsplit"), work_folder(tmp_path / "g.gsplit"):
        living = [name for name in _listing(tmp_path) if name.startswith(".g.")]
        assert len(living) == 2
        sample_store(tmp_path / "g.gsplit")
        assert _listing(tmp_path) == [*living, ".other.gsplit.tmp-deaddead", "g.gsplit"]
    assert _listing(tmp_path) == [".other.gsplit.tmp-deaddead", "g.gsplit"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "g.gsplit").symlink_to(tmp_path / "g.gsplit")
    with work_folder(tmp_path / "links" / "g.gsplit") as folder:
        assert folder.parent == tmp_path  # where the next writer looks for it


def test_an_overwrite_killed_between_its_renames_gives_the_old_store_back(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    store.path.rename(tmp_path / ".g.gsplit.old-00000001")
    with pytest.raises(StoreError, match="expected no file or directory"):
        sample_store(store.path)
    verify_store(open_store(store.path))
    assert _listing(tmp_path) == ["g.gsplit"]


def test_what_is_not_whole_never_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".g.gsplit.old-00000001").mkdir()  # a store whose deletion was cut short
    (tmp_path / ".g.gsplit.old-00000001" / "indptr.npy").touch()
    sample_store(tmp_path / "g.gsplit")
    assert _listing(tmp_path) == ["g.gsplit"]


def test_an_interrupt_between_the_renames_keeps_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    real = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    empty = np.empty(0, np.int64)
    with pytest.raises(KeyboardInterrupt):
        build_store(source_of(1, empty, empty), store.path, overwrite=True)
    assert _listing(tmp_path) == ["g.gsplit"]
    assert open_store(store.path).num_vertices == 300


def test_only_stores_are_replaced_and_links_are_followed(tmp_path: Path) -> None:
    other = tmp_path / "app.gsplit"
    other.mkdir()
    (other / "manifest.json").write_text('{"name": "my web app"}')
    empty = np.empty(0, np.int64)
    with pytest.raises(StoreError, match="replaces stores only"):
        build_store(source_of(1, empty, empty), other, overwrite=True)
    sample_store(tmp_path / "real.gsplit")
    (tmp_path / "link.gsplit").symlink_to("real.gsplit")
    for _ in range(2):
        build_store(source_of(1, empty, empty), tmp_path / "link.gsplit", overwrite=True)
    assert _listing(tmp_path) == ["app.gsplit", "link.gsplit", "real.gsplit"]
    assert open_store(tmp_path / "real.gsplit").num_vertices == 1


def test_names_are_not_patterns(tmp_path: Path) -> None:
    (tmp_path / ".victim.gsplit.tmp-00000001").mkdir()
    (tmp_path / ".a[1].gsplit.tmp-00000001").mkdir()
    sample_store(tmp_path / "a[1].gsplit")
    sample_store(tmp_path / "*.gsplit")
    assert _listing(tmp_path) == ["*.gsplit", ".victim.gsplit.tmp-00000001", "a[1].gsplit"]


def test_outputs_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    for name, message in (
        ("none/g.gsplit", "expected a directory to write in .got no such directory"),
        (".gsplit", "expected NAME.gsplit"),
    ):
        with pytest.raises(StoreError, match=message):
            sample_store(tmp_path / name)
    assert _listing(tmp_path) == []


def test_six_kills_leave_no_half_store_and_no_debris(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SIGKILL at random moments, before, during and after the writing; then one run to the end."""
    out = tmp_path / "g.gsplit"
    command = ["-m", "gsplit", "import", "synthetic", str(out), "--overwrite", "--json"]
    command += ["--vertices", "20000", "--edges", "300000", "--features", "16"]
    said = tmp_path_factory.mktemp("said")
    assert run_forked(command, said).returncode == 0  # compiles the kernels too
    start = time.monotonic()
    assert run_forked(command, said).returncode == 0
    whole = time.monotonic() - start
    want = open_store(out).manifest.arrays
    killed, half_way, random_source = 0, 0, random.Random(4)
    while killed < 6:
        before = set(_listing(tmp_path))
        started = start_forked(command, said)
        if killed % 2:  # every other one surely while it writes, however slow the start is beside other tests
            while started.process.is_alive() and not any(".tmp-" in name for name in set(_listing(tmp_path)) - before):
                time.sleep(0.002)
        time.sleep(whole * random_source.uniform(0.0, 0.5 if killed % 2 else 1.0))
        if started.process.is_alive():
            os.kill(started.pid, signal.SIGKILL)
        started.process.join(300)
        killed += started.process.exitcode == -signal.SIGKILL
        half_way += any(".tmp-" in name for name in _listing(tmp_path))
        if out.exists():
            assert open_store(out).manifest.arrays == want
    assert half_way >= 3  # the kills did hit the writing
    assert run_forked(command, said).returncode == 0
    assert _listing(tmp_path) == ["g.gsplit"]
    assert open_store(out).manifest.arrays == want
    verify_store(open_store(out))
