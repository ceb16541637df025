"""How a rank ends: in good order by itself, at once where it failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# what is registered first runs last: after whatever gsplit.init registers
PROGRAM = """
import atexit, sys, torch.distributed as dist
atexit.register(lambda: print("left" if not dist.is_initialized() else "still in", flush=True))
import gsplit, torch
from gsplit.distributed.comm import Call
mesh = gsplit.init("cpu", timeout_s=30)
mesh.world.all_reduce(Call("once"), torch.ones(1)).wait()
if sys.argv[1] == "fails" and mesh.rank == 0:
    raise RuntimeError("on purpose")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how, code, said", [("ends", 0, {"left"}), ("fails", 1, {"still in", "left"})])
def test_a_program_that_just_ends_leaves_the_group(how: str, code: int, said: set[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), how]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    words = set(done.stdout.splitlines())
    assert words <= said and (how == "fails" or words == said)
    assert ("still in" in words) == (how == "fails")
