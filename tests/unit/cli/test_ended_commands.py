"""What a command says, and the code it exits with, when it is told to end."""

import subprocess
import sys
from pathlib import Path

import pytest

from gsplit.run.folder import checkpoint_folder
from gsplit.training.checkpoints.names import checkpoint_path

PROGRAM = """
import os, signal, sys
from pathlib import Path
import typer
from gsplit.cli.console import command
from gsplit.cli.train_commands import _Kept

class Interrupted:
    def find_spec(self, name, *rest):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupted())
try:
    with command(False, lost=_Kept(Path(sys.argv[1]))):
        import torch
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize("has_checkpoint, code, said", [(False, 143, "no weights"), (True, 75, "--resume")])
def test_sigterm_while_torch_is_imported(has_checkpoint: bool, code: int, said: str, tmp_path: Path) -> None:
    if has_checkpoint:
        folder = checkpoint_folder(tmp_path / "1")
        folder.mkdir(parents=True)
        checkpoint_path(folder, 3).write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: terminated; ") and said in done.stderr and "Traceback" not in done.stderr
