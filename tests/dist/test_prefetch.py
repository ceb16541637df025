"""Batches made ahead: the same bits at every depth, and an end in good time however a rank fails."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefetch_programs import train_in_pieces

from gsplit.testing import run_ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "replicas, splits, strategy", [(1, 1, "split"), (1, 2, "split"), (1, 3, "split"), (2, 2, "split"), (1, 2, "data")]
)
def test_losses_and_weights_are_the_same_bits_at_every_depth(replicas: int, splits: int, strategy: str) -> None:
    size = replicas * splits
    none = run_ranks(train_in_pieces, size, strategy, 0, replicas=replicas)
    assert len(none[0][0]) > 6
    for depth in (1, 4) if strategy == "split" else (2,):
        assert run_ranks(train_in_pieces, size, strategy, depth, replicas=replicas) == none


# a rank fails as its arguments say; the others say what they saw, and are ended by nobody
PROGRAM = """
import os, signal, sys
import gsplit, torch
from prefetch_programs import make_trainer

how, mesh = sys.argv[1], gsplit.init("cpu", timeout_s=60)
trainer = make_trainer(mesh, prefetch=3)
inputs = trainer.state.loader._strategy._loader._inputs
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


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "how, codes, failed",
    [
        ("read", (1, 1), "OSError: [Errno 5] Input/output error: 'features/x'"),
        ("loop", (1, 1), "RuntimeError: on purpose"),
        ("kill", (1, -9), ""),
    ],
)
def test_every_rank_ends_with_the_cause_when_one_fails(
    how: str, codes: tuple[int, int], failed: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[1] / "support")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), how],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ranks[1].wait(100)
        start = time.monotonic()
        said = [rank.communicate(timeout=30) for rank in ranks]
        assert time.monotonic() - start < 10
    finally:
        for rank in ranks:
            rank.kill()
    assert tuple(rank.returncode for rank in ranks) == codes, said
    assert "CommError" in said[0][1] and "all ranks to join" in said[0][1], said[0][1]
    assert failed in said[1][1]
    assert all("step 1" in out for out, _ in said)  # what had been made before the failure was trained on
