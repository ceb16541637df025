"""N ranks against one process, in every combination of options: the whole grid of tests/exactness, in its own process.

    python -m gsplit_bench exactness OUT.json [GROUP ...]

Needs a checkout: the harness belongs to the tests.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Train the grid, or some of its groups; exit code 1 if a difference is above the bound."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "tests.exactness", "grid", *arguments], env=environment).returncode
