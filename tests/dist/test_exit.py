"""How a rank ends: in good order by itself, at once where it failed."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import run_forked

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

# what is registered first runs last: after whatever gsplit.init registers
PROGRAM = """
import atexit, os, sys, time, torch.distributed as dist
atexit.register(lambda: os.write(1, b"left\\n" if not dist.is_initialized() else b"still in\\n"))
import gsplit, torch
from gsplit.distributed.comm.comm import Call

def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

how = sys.argv[1]
mesh = gsplit.init("cpu", timeout_s=3000)  # whoever waited would be killed before
pids = mesh.world.gather_text(Call("process"), str(os.getpid()))
if how != "ends":
    if mesh.rank == 1:  # joins nothing any more, and ends after rank 0
        while runs(pids[0]):
            time.sleep(0.1)
        os._exit(0)
    mesh.world.all_reduce(Call("never joined"), torch.ones(1))
    if how == "fails":
        raise RuntimeError("on purpose")
    try:
        with mesh:
            raise RuntimeError("on purpose")
    except RuntimeError:
        print("goes on", flush=True)
"""


@pytest.mark.parametrize(
    "how, code, said",
    [("ends", 0, ["left", "left"]), ("fails", 1, ["still in"]), ("catches", 0, ["goes on", "still in"])],
)
def test_a_rank_leaves_by_itself_and_never_waits_when_it_failed(
    how: str, code: int, said: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_forked([*launcher, str(program), how], tmp_path, timeout_s=500)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == said


MESHES = """
import os, sys, time, torch, torch.distributed as dist, gsplit
from gsplit.distributed.comm.comm import Call
rank = int(os.environ["RANK"])
if sys.argv[1] == "other replicas":
    try:
        gsplit.init(replicas=1 + rank)
    except gsplit.InputError as error:
        print(error, flush=True)
    sys.exit()
if sys.argv[1] == "again":
    for _ in range(3):
        mesh = gsplit.init()
        mesh.world.all_reduce(Call("sum"), torch.ones(1)).wait()
        mesh.close()
        time.sleep(2 * rank)  # rank 0 joins first, and must not find where rank 1 was before
    print("joined three times", flush=True)
    sys.exit()
dist.init_process_group("gloo")  # the program's own
for _ in range(2):
    gsplit.init().close()
assert dist.is_initialized() and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
dist.all_reduce(torch.ones(1))
print(len(dist.distributed_c10d._world.pg_map), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "how, said",
    [
        ("other replicas", "gsplit.init: replicas: expected the same on every rank (got rank 0: 1, rank 1: 2)"),
        ("own group", "1"),  # nothing of ours is left
        ("again", "joined three times"),
    ],
)
def test_ranks_ask_for_one_mesh_may_join_again_and_leave_no_groups(how: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MESHES)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_forked([*launcher, str(program), how], tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(said) == 2, done.stdout  # the lines of two ranks may run into each other


# collectives of one rank end by themselves, here while the program does
ENDS_WHILE_GLOO_WORKS = """
import sys, torch, torch.distributed as dist
from gsplit.distributed.comm.process_groups import Connection
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
connection = Connection(True, 60)
group = connection.new_comm(torch.device("cpu"))._group
rows = torch.ones(1_000_000)
for _ in range(20):
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group, async_op=True)
if sys.argv[1] == "fails":
    raise RuntimeError("on purpose")
connection.abandon()
"""


@pytest.mark.parametrize("how, code", [("fails", 1), ("catches", 0)])
def test_a_failed_rank_is_not_aborted_by_a_collective_that_ends_with_it(how: str, code: int) -> None:
    command = [sys.executable, "-c", ENDS_WHILE_GLOO_WORKS, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize("nproc", [pytest.param("1", marks=pytest.mark.weekly), "2"])  # the launcher is alone too
def test_the_command_ends_without_reports_of_leaks(nproc: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")  # its bindings report objects that are left when the interpreter ends
    build_store(synthetic_source(PlantedGraph(1000, 6000, num_features=8)), tmp_path / "demo.gsplit")
    options = ["--hidden", "8", "--fanout", "3,3", "--batch-size", "256", "--epochs", "1", "--nproc", nproc]
    command = [sys.executable, "-m", "gsplit", "train", str(tmp_path / "demo.gsplit"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "last loss" in done.stdout + done.stderr
    assert "leaked" not in done.stdout + done.stderr
