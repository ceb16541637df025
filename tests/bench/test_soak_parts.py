"""The parts of a soak: what a process tree holds, slopes, and two hosts on one machine."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest

from gsplit.errors import CommError, InputError
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.small_disk import SmallDisk
from gsplit_bench.soak import SoakPlan, run_soak
from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS, Run
from gsplit_bench.soak_life import Life
from gsplit_bench.soak_watch import Usage, find_ranks, fit_slope, lives, slopes_of, usage_of
from gsplit_bench.wall_clock import WallClock

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
        held = usage_of([launcher.pid], time.monotonic(), num_steps=0, temporary_files=0)
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
    assert usage_of([launcher.pid], 0.0, num_steps=0, temporary_files=0).processes == 0


def test_growth_is_told_from_noise() -> None:
    times = [20.0 + 2 * number for number in range(100)]
    noise = [1e9 + (-1) ** number * 1e6 for number in range(100)]
    flat = fit_slope([(times, noise)])
    assert flat.is_flat and abs(flat.per_hour) < 3 * flat.error
    growing = [value + 1e5 * at for at, value in zip(times, noise, strict=True)]
    leak = fit_slope([(times, growing)])
    assert not leak.is_flat and leak.per_hour == pytest.approx(3.6e8, rel=0.1)
    again = fit_slope([(times, growing), (times, [value + 5e9 for value in growing])])  # a start that holds more
    assert not again.is_flat and again.per_hour == pytest.approx(leak.per_hour) and again.error < leak.error


def test_starting_and_ending_are_no_growth() -> None:
    starting = [Usage(float(at), 40, 3, 100 * at, 1, 4, 0, 0) for at in range(8)]  # resumed from step 40
    steady = [Usage(20.0 + at, 60 + at, 3, 500, 9, 30, 2, 1) for at in range(20)]
    ending = [Usage(41.0, 80, 3, 99, 1, 1, 0, 0), Usage(42.0, 80, 1, 9, 1, 1, 0, 0)]
    slopes = slopes_of([[*starting, *steady, *ending], steady[:3], starting, []])
    names = ("memory_bytes", "threads", "descriptors", "segments", "temporary_files")
    assert {name: (slope.per_hour, slope.mean) for name, slope in slopes.items()} == dict(
        zip(names, [(0.0, mean) for mean in (500, 9, 30, 2, 1)], strict=True)
    )
    assert slopes_of([steady[:3], starting]) == {}


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


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_packets_are_lost_at_the_rate_asked_for() -> None:
    receive = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('0.0.0.0', 4000))\n"
        "s.settimeout(60); print('up', flush=True); count = 0\n"
        "while s.recv(9) != b'end': count += 1\n"
        "print(count)"
    )
    with HostNetwork() as hosts:
        send = (
            "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "for number in range(600):\n"
            f"    s.sendto(b'end' if number >= 500 else b'x', ('{hosts.addresses[0]}', 4000)); time.sleep(0.001)"
        )
        received = []
        for percent in (0.0, 30.0, 0.0):  # the first also resolves addresses, whose packets could be lost
            hosts.set_loss(percent)
            listening = subprocess.Popen(hosts.command(0, [sys.executable, "-c", receive]), stdout=subprocess.PIPE)
            assert listening.stdout is not None and listening.stdout.readline() == b"up\n"
            subprocess.run(hosts.command(1, [sys.executable, "-c", send]), check=True)
            received.append(int(listening.communicate()[0]))
    assert 280 < received[1] < 420 and received[0] == received[2] == 500


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root")
def test_a_disk_is_full_slow_or_stopped_until_it_is_repaired(tmp_path: Path) -> None:
    with SmallDisk(tmp_path) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(bytes(1 << 20))
        disk.repair()
        (disk.folder / "more").write_bytes(bytes(1 << 20))
        for slow in (partial(disk.set_rate, 1000), disk.freeze):
            slow()
            write = subprocess.Popen(
                ["dd", "if=/dev/zero", f"of={disk.folder / 'x'}", "bs=8k", "count=1", "conv=fsync"]
            )
            time.sleep(1)
            assert write.poll() is None
            disk.repair()
            assert write.wait(60) == 0
    assert list(disk.folder.iterdir()) == []


def test_a_disk_of_its_own_is_refused_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="disk: expected root, mkfs.ext4"):
        SmallDisk(tmp_path)


def test_the_wall_clock_of_a_program_jumps_and_its_waits_do_not(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    code = (
        "import sys, threading, time\n"
        "for line in sys.stdin:\n"
        "    begin = time.monotonic(); threading.Event().wait(0.05)\n"
        "    print(time.time(), time.monotonic() - begin, flush=True)"
    )
    environment = {**os.environ, **clock.environment}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, stdin=pipe, stdout=pipe) as program:
        assert program.stdin is not None and program.stdout is not None
        for moved in (0, 3600, -3600):
            clock.jump(moved - clock.seconds)
            print("now", file=program.stdin, flush=True)
            now, waited = map(float, program.stdout.readline().split())
            assert abs(now - time.time() - moved) < 60 and 0.05 <= waited < 60
        program.stdin.close()


def test_a_clock_that_jumps_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="clock: expected the command cc"):
        WallClock(tmp_path / "clock")


def test_two_hosts_are_refused_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="hosts: expected root, ip and tc"):
        HostNetwork()


def _life(code: str, folder: Path) -> Life:
    for name in ("out-0", "err-0"):
        (folder / name).touch()
    with (folder / "err-0").open("wb") as err:
        return Life([subprocess.Popen([sys.executable, "-c", code], stderr=err)], folder, num_ranks=2)


def test_ranks_that_do_not_start_are_told(tmp_path: Path) -> None:
    life = _life("import time; time.sleep(600)", tmp_path)
    try:
        assert not life.wait_for_ranks(0.2) and not life.is_over()
    finally:
        life.end([])


def test_a_run_that_has_ended_is_told_from_one_that_has_finished(tmp_path: Path) -> None:
    life = _life("import sys; sys.exit('error: no')", tmp_path)
    life.processes[0].wait()
    assert not life.wait_for_ranks() and not life.has_finished()
    assert life.message() == "error: no" and life.exit_codes == (1,)
    with pytest.raises(CommError, match="soak: expected a finished run .got error: no"):
        life.losses()
    life = _life("", tmp_path)
    life.processes[0].wait()
    assert life.wait_gone([], 60) and life.has_finished()


def test_faults_come_in_turns_for_a_count_or_a_time() -> None:
    names = ("kill", "stall", "freeze")
    order = [fault.name for fault in SoakPlan(Path("store"), faults=names, num_faults=7).order(Random(0))]
    assert len(order) == 7 and set(order[:3]) == set(order[3:6]) == set(names)
    assert list(SoakPlan(Path("store"), minutes=0).order(Random(0))) == []
    with pytest.raises(InputError, match="bench soak: expected kill, drop, loss, cut, on 1 or 2 hosts .got clock"):
        run_soak(SoakPlan(Path("store"), faults=("clock",), hosts=2))
