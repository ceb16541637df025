"""The parts of a soak: what a process tree holds, slopes, and two hosts on one machine."""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from gsplit.errors import CommError, InputError
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.soak import Life
from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS, Run
from gsplit_bench.soak_watch import Usage, find_ranks, fit_slope, lives, slopes_of, usage_of

SLEEPER = """
import os, subprocess, sys, time
if "RANK" not in os.environ:
    for rank in ("0", "1"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "RANK": rank})
time.sleep(600)
"""


def test_ranks_are_found_under_their_launcher_and_counted_with_it() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    ranks: dict[int, int] = {}
    try:
        end = time.monotonic() + 300
        while len(ranks := find_ranks(launcher.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert sorted(ranks) == [0, 1] and all(lives(pid) for pid in ranks.values())
        held = usage_of([launcher.pid], time.monotonic())
        assert held.processes == 3 and held.threads >= 3 and held.memory_bytes > 1e6 and held.descriptors > 3
        assert FAULTS["kill"].inflict(Run([launcher.pid]), Random(0)).startswith("SIGKILL to rank")
        end = time.monotonic() + 300
        while all(lives(pid) for pid in ranks.values()) and time.monotonic() < end:
            time.sleep(0.05)
        assert sum(lives(pid) for pid in ranks.values()) == 1
    finally:
        for pid in (launcher.pid, *ranks.values()):
            if lives(pid):
                os.kill(pid, 9)
        launcher.wait()
    assert usage_of([launcher.pid], 0.0).processes == 0


def test_growth_is_told_from_noise() -> None:
    times = [20.0 + 2 * number for number in range(100)]
    noise = [1e9 + (-1) ** number * 1e6 for number in range(100)]
    flat = fit_slope(times, noise)
    assert flat.is_flat and abs(flat.per_hour) < 3 * flat.error
    leak = fit_slope(times, [value + 1e5 * at for at, value in zip(times, noise, strict=True)])
    assert not leak.is_flat and leak.per_hour == pytest.approx(3.6e8, rel=0.1)


def test_starting_and_ending_are_no_growth() -> None:
    steady = [Usage(20.0 + at, 3, 500, 9, 30) for at in range(20)]
    slopes = slopes_of([Usage(1.0, 1, 100, 1, 4), *steady, Usage(50.0, 1, 9, 1, 1)])
    assert {name: slope.per_hour for name, slope in slopes.items()} == {
        "memory_bytes": 0.0,
        "threads": 0.0,
        "descriptors": 0.0,
    }
    assert slopes_of(steady[:3]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_reach_each_other_until_the_cable_is_pulled() -> None:
    with HostNetwork(rate="100mbit") as hosts:
        server = "import socket; s = socket.create_server(('0.0.0.0', 4000)); print('up', flush=True); s.accept()"
        listening = subprocess.Popen(hosts.command(0, [sys.executable, "-c", server]), stdout=subprocess.PIPE)
        assert listening.stdout is not None
        try:
            assert listening.stdout.readline() == b"up\n"
            client = f"import socket; socket.create_connection(('{hosts.addresses[0]}', 4000), timeout=3)"
            assert subprocess.run(hosts.command(1, [sys.executable, "-c", client]), check=False).returncode == 0
            assert HOST_FAULTS["cut"].inflict(Run([], hosts), Random(0)) == "link cut"
            cut = subprocess.run(hosts.command(1, [sys.executable, "-c", client]), check=False, capture_output=True)
            assert cut.returncode != 0
        finally:
            listening.kill()
            listening.wait()
            listening.stdout.close()
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in names for name in hosts.names)


def test_two_hosts_are_refused_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="hosts: expected root, ip and tc"):
        HostNetwork()


def _life(code: str, folder: Path) -> Life:
    for name in ("out-0", "err-0"):
        (folder / name).touch()
    with (folder / "err-0").open("wb") as err:
        return Life([subprocess.Popen([sys.executable, "-c", code], stderr=err)], folder, num_ranks=2)


@pytest.mark.parametrize(
    "code, message",
    [
        ("import time; time.sleep(600)", "expected 2 ranks .got 0 after 0.2 s; it printed nothing"),
        ("import sys; sys.exit('error: no')", r"expected 2 ranks .got exit codes \(1,\); it printed error: no"),
    ],
)
def test_ranks_that_do_not_start_are_described(code: str, message: str, tmp_path: Path) -> None:
    life = _life(code, tmp_path)
    try:
        if "exit" in code:
            life.processes[0].wait()
        with pytest.raises(CommError, match=message):
            life.wait_for_ranks(0.2)
    finally:
        life.end([])


def test_a_run_that_has_finished_is_not_waited_for(tmp_path: Path) -> None:
    life = _life("", tmp_path)
    life.wait_for_ranks()
    assert life.is_over() and life.exit_codes == (0,)
