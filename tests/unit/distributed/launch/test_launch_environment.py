"""What ranks are started with: tuned unless told otherwise, and what the user has set."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit.distributed.launch.launcher import _environment_of_ranks


def test_ranks_are_tuned_but_for_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    found = _environment_of_ranks(64, tuned_allocator=True, threads=None)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["MALLOC_MMAP_MAX_"] == "7"  # the user's
    assert found["MALLOC_TOP_PAD_"] == ALLOCATOR["MALLOC_TOP_PAD_"]
    assert found["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_measurement_says_threads_and_may_leave_the_allocator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = _environment_of_ranks(2, tuned_allocator=False, threads=3)
    assert found["OMP_NUM_THREADS"] == "3"
    assert not ALLOCATOR.keys() & found.keys()


@pytest.mark.parametrize("threads", ["", "auto", "0", " "])
def test_a_number_of_threads_that_is_not_one_is_left_out(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)  # as $SLURM_CPUS_PER_TASK of a job without it
    assert _environment_of_ranks(64, tuned_allocator=True, threads=None)["OMP_NUM_THREADS"] == "1"


def test_threads_of_every_level_of_nesting_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert _environment_of_ranks(64, tuned_allocator=True, threads=None)["OMP_NUM_THREADS"] == "3,2"


def test_a_rank_knows_when_its_torchrun_began(tmp_path: Path) -> None:
    asks = "from gsplit.distributed.launch.launched_rank import torchrun_start_s; print(torchrun_start_s())"
    (tmp_path / "torchrun").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {asks!r}])\n")
    began_s = time.time()
    words = [[sys.executable, str(tmp_path / "torchrun")], [sys.executable, "-c", asks]]
    by_torchrun, alone = (subprocess.run(each, capture_output=True, text=True, timeout=300).stdout for each in words)
    assert began_s - 2 < float(by_torchrun) < time.time() + 2
    assert alone == "None\n"
