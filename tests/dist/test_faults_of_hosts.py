"""A rank that ends, or does not come, on one host is named on the others, too."""

from pathlib import Path

import pytest
from forked_scripts import start_forked

from gsplit.distributed.launch.launched_rank import STORE

# Two ranks per host; every rank prints what it is told.
PROGRAM = """
import os, sys, time, torch
import gsplit
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.watch import processes

rank, how = int(os.environ["RANK"]), sys.argv[1]
processes.describe_host = lambda: f"host {rank // 2}"
mesh = gsplit.init("cpu", timeout_s=5 if how == "waits" else 3000)

def count(group, turn):
    return group.all_to_all_counts(Call("count", turn), (1,) * group.size)

def sum_over(group):
    group.all_reduce(Call("mean", 9), torch.ones(3)).wait()

sum_over(mesh.world)
mesh.record_stage("forward of epoch 2, step 9")
try:
    if how == "waits":  # rank 0 waits for rank 1 on its host, which waits for rank 3
        assert mesh.loading.levels.far.size == 2
        if rank == 3:
            time.sleep(12)
        count(mesh.loading.levels.far if rank % 2 else mesh.loading.levels.near, 1)
    elif rank == mesh.size - 1:
        os._exit(1)
    sum_over(mesh.world)
except gsplit.GSplitError as error:
    print(error, flush=True)
    os._exit(3)
"""


def _run(how: str, num_ranks: int, folder: Path) -> list[str]:
    """What every rank was told."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    given = {STORE: str(folder / "store"), "WORLD_SIZE": str(num_ranks), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        start_forked([str(program), how], folder, given | {"RANK": str(rank)}, name=f"rank-{rank}")
        for rank in range(num_ranks)
    ]
    done = [rank.wait(300) for rank in ranks]
    assert not any("Traceback" in rank.stderr for rank in done), [rank.stderr for rank in done]
    return [rank.stdout for rank in done]


@pytest.mark.parametrize("num_ranks", [4, 3], ids=["its neighbour tells", "nobody else is there"])
def test_a_rank_that_ends_is_named_on_the_other_host(num_ranks: int, tmp_path: Path) -> None:
    gone = num_ranks - 1
    words = f"rank {gone} (process " if num_ranks == 4 else f"rank {gone} is silent: it has ended or is stopped, or "
    for told in _run("ends", num_ranks, tmp_path)[:gone]:
        assert f": mean of step 9: expected all ranks to join (got {words}" in told, told
        assert "has ended" in told and told.count("its last collective") == 1
        assert "; its last stage: forward of epoch 2, step 9" in told or num_ranks == 3  # told every two seconds


def test_a_rank_that_waits_for_another_host_is_not_blamed(tmp_path: Path) -> None:
    told = _run("waits", 4, tmp_path)
    for rank in (0, 1):
        assert "within 5 s (got rank 3 has not come; " in told[rank], told[rank]
        assert "its last stage: forward of epoch 2, step 9" in told[rank]
    assert "(got rank 3 (process " in told[2] and "rank 3, main thread" in told[2]
    assert "(got rank 1 has given up waiting for rank 3)" in told[3], told[3]  # it came late
