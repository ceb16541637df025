"""What another user of the machine can do to a run: nothing that is executed, nothing that is read."""

import os
import stat
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from intruder import listening, payload, read_as_other_user, write_everywhere
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gsplit.distributed.launch.launcher import launch

PROGRAM = """
import os, pathlib, sys, time
import gsplit, torch
from gsplit.distributed.comm.comm import Call
mesh = gsplit.init("cpu")
folder, last = pathlib.Path(sys.argv[1]), torch.zeros(1)
(folder / f"pid-{mesh.rank}").symlink_to(str(os.getpid()))
while not last:
    last.fill_(float((folder / "stop").exists()))
    mesh.world.all_reduce(Call("go on?"), last).wait()
    mesh.loading.all_to_all_counts(Call("go on?"), (1,) * mesh.size)
    time.sleep(0.01)
"""


def test_the_attack_works_on_the_rendezvous_of_torchelastic(tmp_path: Path) -> None:
    """Why ``launch`` has none of it, and that this file's attack is one."""
    warnings.simplefilter("ignore", DeprecationWarning)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    handler = DynamicRendezvousHandler.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1)
    assert write_everywhere([store.port], payload(tmp_path / "executed"), ["torch.rendezvous.run"]) == [
        f"port {store.port}"
    ]
    with pytest.raises(Exception, match="."):  # what it makes of the rest does not matter
        handler.next_rendezvous()
    assert (tmp_path / "executed").is_dir()


def test_an_intruder_reaches_nothing_of_a_run(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    results: list[int] = []
    before = listening([os.getpid()])  # other tests'
    command = [sys.executable, str(script), str(tmp_path)]
    running = threading.Thread(target=lambda: results.append(launch(command, 2)))
    running.start()
    try:
        ranks = _wait_for_ranks(tmp_path, running)
        ports = [place for place in listening([*ranks, os.getpid()]) if place not in before]
        assert len(ports) >= 2  # gloo's own
        assert {address for address, _ in ports} <= {"127.0.0.1"}
        _look_at_files(ranks)
        assert write_everywhere([port for _, port in ports], payload(tmp_path / "executed")) == []
        time.sleep(0.5)
        assert running.is_alive()
    finally:
        (tmp_path / "stop").touch()
        running.join(300)
    assert results == [0]
    assert not (tmp_path / "executed").exists()


def _wait_for_ranks(folder: Path, running: threading.Thread) -> list[int]:
    deadline = time.monotonic() + 300
    while len(found := list(folder.glob("pid-*"))) < 2:
        assert time.monotonic() < deadline and running.is_alive()
        time.sleep(0.1)
    return [int(str(link.readlink())) for link in found]


def _look_at_files(ranks: list[int]) -> None:
    """What ranks hold open has no name, or belongs to its owner alone, or is no secret (what was installed)."""
    held = [file for pid in ranks for file in Path(f"/proc/{pid}/fd").iterdir()]
    links = {str(file): str(file.readlink()) for file in held}
    assert sum(link.startswith("/memfd:gsplit") for link in links.values()) >= 4
    for file, link in links.items():
        if link.startswith(("/dev/shm/", "/tmp/")) and "pytest" not in link:
            assert stat.S_IMODE(Path(file).stat().st_mode) & 0o077 == 0, link
    if os.geteuid() == 0:  # else there is no other user to try it as
        secrets = [*links, *(f"/proc/{pid}/{name}" for pid in ranks for name in ("environ", "mem", "maps"))]
        assert read_as_other_user(secrets) == []
        assert read_as_other_user(["/proc/self/maps"]) == ["/proc/self/maps"]
