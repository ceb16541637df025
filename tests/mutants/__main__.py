"""Plant every mistake in a copy of the package, and run tests until one fails.

    python -m tests.mutants --out record.json            the change lane
    python -m tests.mutants --weekly --only NAME         with the weekly tests

Tests run in the order of ``FIRST`` for the mistake's area, then all others. The record has, for every mistake, the test
that found it and the seconds until then; nothing was found if it survives. Exit code 1 if one survives.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.planted import Mutant

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600


def plant(mutant: Mutant, source: Path) -> None:
    """Write the mistake into a copy of the package."""
    path = source / "gsplit" / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: expected its line once in {mutant.path} (got {text.count(mutant.old)})")
    path.write_text(text.replace(mutant.old, mutant.new))


def find(mutant: Mutant, tests: list[str], options: list[str], warm: Path) -> dict[str, object]:
    """The test that finds a mistake, and in how many seconds."""
    with tempfile.TemporaryDirectory(prefix="gsplit-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, source)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), str(ROOT), str(ROOT / "benchmarks")]),
            "NUMBA_CACHE_DIR": f"{folder}/numba",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        begun = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
            found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            text = done.stdout[-2000:]
        except subprocess.TimeoutExpired:
            found = [f"nothing within {TIMEOUT_S} s"]
            text = ""
        seconds = time.perf_counter() - begun
    return {
        "name": mutant.name,
        "area": mutant.area,
        "found_by": found[0] if found else None,
        "seconds": round(seconds, 1),
        "text": "" if found else text,
    }
