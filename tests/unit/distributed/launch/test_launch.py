"""The launcher with small programs as ranks: what it returns, whom it names, how fast it ends, what it leaves.

Programs import nothing of torch; a line of theirs says how far they are with joining, as ``gsplit.init`` does.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gsplit.distributed.launch import launcher as launch_module
from gsplit.distributed.launch.launcher import DIFFERS, REQUEUE, GroupFailedError, launch

RANK = """
import os, signal, sys, time
from gsplit.distributed.launch.launched_rank import Status, end_with_launcher, fail, set_status
rank = int(os.environ["RANK"])
end_with_launcher()
"""
LAUNCHER = """
import sys
from gsplit.distributed.launch.launcher import launch
from gsplit.errors import Terminated
try:
    sys.exit(launch([sys.executable, "-c", sys.argv[1]], 2))
except Terminated:
    sys.exit(143)
"""


def _launch(program: str, nproc: int = 2, **options: float) -> int:
    return launch([sys.executable, "-c", RANK + program], nproc, **options)  # type: ignore[arg-type]


def _failure(program: str, nproc: int = 2, within_s: float = 50.0) -> str:
    start = time.monotonic()
    with pytest.raises(GroupFailedError) as caught:
        _launch(program, nproc)
    assert time.monotonic() - start < within_s
    return str(caught.value)


@pytest.mark.parametrize("code", [0, DIFFERS, REQUEUE])
def test_what_all_ranks_end_with_is_passed_on(code: int) -> None:
    assert _launch(f"time.sleep(0.3 * rank); sys.exit({code})") == code


def test_the_rank_that_raised_is_named_not_the_first_that_lost_it() -> None:
    said = _failure("""
from gsplit.errors import CommError
if rank == 1:
    time.sleep(0.2)
    fail(ValueError("no neighbours: 7"), 1)
time.sleep(0.6)
fail(CommError("rank 0: sample of step 3: expected all ranks to join (got an end). Fix: look."), 2)
""")
    assert said == "rank 1: ValueError: no neighbours: 7"


def test_a_killed_rank_is_named_with_the_place_where_it_was_missed() -> None:
    said = _failure("""
from gsplit.errors import CommError
set_status(Status.JOINED)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
fail(CommError("rank 0: shuffle of step 3: expected all ranks to join (got an end). Fix: look."), 2)
""")
    assert said.startswith("rank 1: expected to finish (got signal 9 (SIGKILL); rank 0 missed it in: shuffle of")


def test_a_rank_that_ends_well_before_joining_is_named_in_seconds() -> None:
    said = _failure(
        """
if rank == 2:
    sys.exit(0)
set_status(Status.JOINING)
time.sleep(600)
""",
        nproc=3,
    )
    assert said.startswith("rank 2: expected to work with the others (got exit code 0 before it had joined the others)")


def test_ranks_that_never_join_may_end_one_after_the_other() -> None:
    assert _launch("time.sleep(0.5 * rank)", 3) == 0


def test_a_stopped_rank_is_named_and_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launch_module, "_WARN_STOPPED_S", 0.5)
    monkeypatch.setattr(launch_module, "_FAIL_STOPPED_S", 1.0)
    said = _failure("os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(600)")
    assert said.startswith("rank 1: expected to go on (got a process that a signal has stopped (SIGSTOP))")
    assert "rank 1 is stopped; kill -CONT" in caplog.text


def test_nothing_is_left_open_or_in_the_environment() -> None:
    before, descriptors = dict(os.environ), len(list(Path("/proc/self/fd").iterdir()))
    _launch("pass")
    _failure("sys.exit(4)")
    assert dict(os.environ) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def _start(program: str, folder: Path) -> tuple["subprocess.Popen[bytes]", list[int]]:
    """A launcher in a process of its own, and its ranks, once they run."""
    said = f"os.symlink(str(os.getpid()), f'{folder}/{{rank}}')"
    started = subprocess.Popen([sys.executable, "-c", LAUNCHER, program.replace("READY", said)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not all((folder / name).is_symlink() for name in "01"):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    return started, [int(str((folder / name).readlink())) for name in "01"]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for_end(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(map(_runs, pids)):
        assert time.monotonic() < deadline, "a rank outlives its launcher"
        time.sleep(0.05)


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_with_a_launcher_that_is_killed(stopped: bool, tmp_path: Path) -> None:
    launcher, ranks = _start(RANK + "READY\ntime.sleep(600)", tmp_path)
    if stopped:
        os.kill(ranks[1], signal.SIGSTOP)
    launcher.kill()
    launcher.communicate()
    _wait_for_end(ranks, 50.0)


def test_ranks_notice_a_launcher_that_was_gone_before_they_could_say(tmp_path: Path) -> None:
    launcher, ranks = _start(
        RANK.replace("end_with_launcher()", "") + "READY\ntime.sleep(0.7)\nend_with_launcher()\ntime.sleep(600)",
        tmp_path,
    )
    launcher.kill()
    launcher.communicate()
    _wait_for_end(ranks, 50.0)


SAVES = """
def save(signum, frame):
    time.sleep(0.5)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
READY
while True: time.sleep(1)
"""


@pytest.mark.parametrize("what", ["saves", "is stopped", "hangs"])
def test_sigterm_lets_ranks_save_and_ends_those_that_do_not(what: str, tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nREADY\ntime.sleep(600)"
    launcher, ranks = _start(RANK + (deaf if what == "hangs" else SAVES), tmp_path)
    if what == "is stopped":
        os.kill(ranks[1], signal.SIGSTOP)
    start = time.monotonic()
    launcher.terminate()
    launcher.communicate(timeout=100)
    assert launcher.returncode == (143 if what == "hangs" else REQUEUE)
    assert time.monotonic() - start < 50  # ranks would sleep for longer
    assert not any(map(_runs, ranks))
