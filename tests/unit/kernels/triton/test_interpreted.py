"""The same tests of kernels in Triton's own interpreter, a second opinion on what a kernel means; weekly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.weekly
@pytest.mark.parametrize("kernels", ["row", "attention", "sampling"])
def test_kernels_are_right_in_tritons_interpreter(kernels: str) -> None:
    """It has to be turned on before triton is first imported, and warns of numbers that overflow."""
    tests = str(HERE / f"test_{kernels}_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "sm_80", "-W", "ignore::RuntimeWarning", tests]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
