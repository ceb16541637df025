"""Batches made ahead: the same bits at every depth and number of threads, and an end in time however a rank fails."""

import socket
import time
from pathlib import Path

import pytest
from forked_scripts import start_forked
from prefetch_programs import train_at_depths

from gsplit_bench.ranks import run_ranks

OTHERS = ("data", "data_cached", "hybrid(1)")
FEW = ((0, 1), (2, 2))
ALL = ((0, 1), (1, 1), (4, 1), (2, 2), (4, 3), (8, 8))  # prefetch, sampling_threads


@pytest.mark.parametrize(
    "replicas, splits, strategies",
    [(1, 1, ("split",)), (1, 2, ("split", *OTHERS)), (1, 3, ("split",)), (2, 2, ("split",))],
)
def test_losses_weights_and_batches_are_the_same_bits_at_every_depth_and_number_of_threads(
    replicas: int, splits: int, strategies: tuple[str, ...]
) -> None:
    is_small = replicas * splits < 3
    depths = [(name, *ahead) for name in strategies for ahead in (ALL if name == "split" and is_small else FEW)]
    ranks = run_ranks(train_at_depths, replicas * splits, depths, replicas=replicas)
    for found in ranks:
        for (strategy, *_), trained in zip(depths, found, strict=True):
            assert len(trained[0]) > 6 and len(trained[2]) > 2
            assert trained == found[depths.index((strategy, 0, 1))]


# a rank fails as its arguments say; the others say what they saw, and are ended by nobody
PROGRAM = """
import os, signal, sys
import gsplit, torch
from prefetch_programs import make_trainer

how, mesh = sys.argv[1], gsplit.init("cpu", timeout_s=300)
trainer = make_trainer(mesh, prefetch=3, sampling_threads=int(sys.argv[2]))
inputs = trainer.state.loader._makers[0].step_loader
stored, reads = inputs._features, 0

class Rows:
    row_shape, dtype = stored.row_shape, stored.dtype
    def read(self, ids, out):
        global reads
        reads += 1
        if reads == 3:
            raise OSError(5, "Input/output error", "features/x")
        return stored.read(ids, out)

def train():
    for number, batch in enumerate(trainer.state.loader):
        trainer.train_step(batch)
        print("step", number, flush=True)
        if mesh.rank == 1 and number == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mesh.rank == 1 and number == 1 and how == "loop":
            raise RuntimeError("on purpose")

if how == "read" and mesh.rank == 1:
    inputs._features = Rows()
train()
"""


@pytest.mark.parametrize(
    "how, threads, codes, failed",
    [
        ("read", 1, (1, 1), "OSError: [Errno 5] Input/output error: 'features/x'"),
        ("read", 2, (1, 1), "OSError: [Errno 5] Input/output error: 'features/x'"),
        ("loop", 1, (1, 1), "RuntimeError: on purpose"),
        ("kill", 2, (1, -9), ""),
    ],
)
def test_every_rank_ends_with_the_cause_when_one_fails(
    how: str, threads: int, codes: tuple[int, int], failed: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        start_forked(
            [str(program), how, str(threads)],
            tmp_path,
            {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            name=f"rank-{rank}",
        )
        for rank in range(2)
    ]
    failing = ranks[1].wait()
    start = time.monotonic()
    done = [ranks[0].wait(), failing]
    assert time.monotonic() - start < 100  # seconds on an idle machine; the other would wait for 300
    said = [(rank.stdout, rank.stderr) for rank in done]
    assert tuple(rank.returncode for rank in done) == codes, said
    assert "CommError" in said[0][1] and "all ranks to join" in said[0][1], said[0][1]
    assert failed in said[1][1]
    assert all("step 1" in out for out, _ in said)  # what had been made before the failure was trained on
