"""What every Triton kernel compiles to, for versions of Triton and architectures, without a device.

    python -m gsplit_bench kernel-matrix                                    # the Triton that is installed
    python -m gsplit_bench kernel-matrix --versions 3.2.0 3.9.0             # others too, in throw-away environments
    python -m gsplit_bench kernel-matrix --python other/bin/python          # one that has its own Triton
    python -m gsplit_bench kernel-matrix --sm 80 90 --output folder/name    # name.json and name.md

Kernels are compiled as the JIT does for aligned pointers and widths. Records registers, bytes of stack and local memory
(spills) of a thread, vector loads, shared memory of a program, or why a kernel does not compile. Ends with code 1 if one spills, does not compile, or takes more than 64 registers.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = [70, 75, 80, 86, 89, 90, 100, 120]
MAX_REGISTERS = 64


def measure(architectures: list[int], packages: str) -> None:
    """Compile everything with the Triton of this interpreter; its version, the kernels, then a JSON record per line."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    sys.path.append(packages)  # torch, after this interpreter's own packages
    import triton

    from gsplit_bench.kernel_cases import CASES, compile_case

    print(json.dumps([triton.__version__, [case.name for case in CASES]]), flush=True)
    for capability in architectures:
        for case in CASES:
            record: dict[str, Any] = {"triton": triton.__version__, "sm": capability, "kernel": case.name}
            start = time.perf_counter()
            try:
                record |= asdict(compile_case(case, capability))
            except Exception as error:  # a compiler's own errors have no common base
                lines = [line for line in str(error).splitlines() if line.strip()]
                record["error"] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
            print(json.dumps(record | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)


def run(python: Path, architectures: list[int], folder: Path) -> list[dict[str, Any]]:
    """The records of another interpreter, which needs no package but Triton, compiled anew.

    A compiler that does not know an architecture may end its process: the rest of the architecture counts as failed.
    """
    packages = str(importlib.metadata.distribution("torch").locate_file(""))
    command = [str(python), __file__, "--measure", "--packages", packages, "--sm", *map(str, architectures)]
    cache = tempfile.mkdtemp(dir=folder)
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    (version, kernels), *records = (json.loads(line) for line in done.stdout.splitlines())
    if done.returncode == 0:
        return records
    at = len(records) // len(kernels)
    error = f"the compiler ended its process with code {done.returncode}"
    records += [
        {"triton": version, "sm": architectures[at], "kernel": kernel, "error": error, "seconds": 0.0}
        for kernel in kernels[len(records) % len(kernels) :]
    ]
    rest = architectures[at + 1 :]
    return records + (run(python, rest, folder) if rest else [])


def environment_with(version: str, folder: Path) -> Path:
    """The interpreter of a new environment that has one version of Triton and nothing else."""
    place = folder / f"triton-{version}"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    wanted = [f"triton=={version}", "--no-deps", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *wanted], check=True)
    return python


def _cell(record: dict[str, Any]) -> str:
    if "error" in record:
        return "no"
    spilled = record["stack_bytes"] + record["local_bytes"]
    shared = f" / {record['shared_bytes']}" if record["shared_bytes"] else ""
    vectors = f" v{record['vector_loads']}" if record["vector_loads"] else ""
    return f"{record['registers']}{vectors}{shared}" + (f" **spills {spilled}**" if spilled else "")


def wrong(record: dict[str, Any]) -> str | None:
    """What a record falls short of."""
    if "error" in record:
        return str(record["error"])
    spilled = record["stack_bytes"] + record["local_bytes"]
    if spilled:
        return f"spills {spilled} bytes"
    return f"{record['registers']} registers" if record["registers"] > MAX_REGISTERS else None


def table(records: list[dict[str, Any]]) -> str:
    """One table for each version of Triton, and what is wrong."""
    lines = []
    for version in dict.fromkeys(r["triton"] for r in records):
        mine = [r for r in records if r["triton"] == version]
        architectures = list(dict.fromkeys(r["sm"] for r in mine))
        compiled = [r for r in mine if "error" not in r]
        most = max((r["registers"] for r in compiled), default=0)
        spilling = sum(r["stack_bytes"] + r["local_bytes"] > 0 for r in compiled)
        taken = f"{spilling} spill, at most {most} registers, {sum(r['seconds'] for r in mine):.0f} s"
        lines += [
            f"## Triton {version}",
            "",
            f"{len(compiled)} of {len(mine)} compiled, {taken}.",
            "",
            "| kernel | " + " | ".join(f"sm_{sm}" for sm in architectures) + " |",
            "|---" * (len(architectures) + 1) + "|",
        ]
        for kernel in dict.fromkeys(r["kernel"] for r in mine):
            cells = [_cell(r) for sm in architectures for r in mine if (r["kernel"], r["sm"]) == (kernel, sm)]
            lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
        reasons: dict[str, list[int]] = {}
        for record in mine:
            if (reason := wrong(record)) is not None:
                reasons.setdefault(f"{record['kernel']}: {reason}", []).append(record["sm"])
        lines += ["", *(f"- {reason} (sm {', '.join(map(str, where))})" for reason, where in reasons.items()), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--python", type=Path, nargs="*", default=[])
    parser.add_argument("--versions", nargs="*", default=[])
    parser.add_argument("--output", type=Path, help="where to write .json and .md")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--packages", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        measure(given.sm, given.packages)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        others = [*given.python, *(environment_with(version, folder) for version in given.versions)]
        records = [r for python in (Path(sys.executable), *others) for r in run(python, given.sm, folder)]
    text = table(records)
    print(text)
    if given.output is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        about = {
            "date": str(datetime.date.today()),
            "commit": commit.stdout.strip(),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "command": f"python -m gsplit_bench kernel-matrix {' '.join(arguments)}",
        }
        given.output.with_suffix(".json").write_text(json.dumps(about | {"records": records}, indent=1) + "\n")
        heading = (
            f"# Kernels, {about['date']}\n\nCommand: `{about['command']}`. Commit {about['commit']}, "
            f"Python {about['python']}, torch {about['torch']}. Compiled, never run: no device. A cell is the "
            "registers of a thread, after a v the vector loads of global memory, and after a stroke the bytes of "
            "shared memory of a program. "
            "Raw records in the `.json` beside this file.\n\n"
        )
        given.output.with_suffix(".md").write_text(heading + text)
    return int(any(wrong(record) is not None for record in records))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
