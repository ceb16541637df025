"""This machine's constants: measured once in about a minute, kept in the user's cache folder, used until it changes.

Two ranks measure the kernels at once and exchange rows; four ranks exchange rows, which says what further ranks add.
They are started like those of ``gsplit train``, with its allocator. The file names the machine, and the versions that
the kernels come from; another machine or version measures again.
"""

import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from gsplit.distributed.launch.launcher import launch
from gsplit.errors import InputError
from gsplit.files.untrusted import Expected, read_document
from gsplit.planner.disk_probe import measure_disk
from gsplit.planner.hardware import Hardware, read_hardware, write_hardware
from gsplit.progress import Progress, silent

__all__ = ["cache_file", "calibrate", "known_machine", "this_machine"]

_STEP_S, _ATTENTION_STEP_S, _SAMPLE_S, _SPLIT_S, _LOAD_S = 2e-3, 3e-3, 0.5e-3, 2e-3, 0.2e-3
"""Host work of a step whatever its size, in Python mostly: set, not measured."""


def cache_file() -> Path:
    """Where this machine's constants are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "gsplit" / "hardware.json"


def _identity() -> dict[str, str]:
    """What the constants depend on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = str(len(os.sched_getaffinity(0)))
    packages = {name: version(name) for name in ("gsplit", "torch", "numba", "numpy")}
    return {"host": platform.node(), "processor": model, "cores": cores, **packages}


def this_machine(*, again: bool = False, path: Path | None = None, progress: Progress = silent) -> Hardware:
    """The constants of this machine, from the cache if it knows them."""
    known = None if again else known_machine(path)
    if known is not None:
        return known
    found = calibrate(progress=progress)
    write_hardware(found, path or cache_file(), _identity())
    return found


def known_machine(path: Path | None = None) -> Hardware | None:
    """The kept constants, if they are those of this machine and these versions."""
    path = path or cache_file()
    if not path.is_file():
        return None
    kept = Expected("constants that were measured before", "remove the file")
    try:
        same = read_document(path, kept).get("notes") == _identity()
        return read_hardware(path) if same else None
    except InputError:  # damaged, or of a version that measured less
        return None


@dataclass(frozen=True, slots=True)
class _Measured:
    """One launch: the medians over its ranks."""

    kernels: dict[str, float]
    comm: dict[str, float]
    thread_gain: float


def calibrate(*, scale: float = 1.0, rank_numbers: tuple[int, int] = (2, 4), progress: Progress = silent) -> Hardware:
    """Measure. ``scale`` makes everything smaller, for tests."""
    few, many = rank_numbers
    first = _run_ranks(few, scale, kernels=True)
    progress("calibrate", 1, 3)
    second = _run_ranks(many, scale, kernels=False) if many > few else first
    progress("calibrate", 2, 3)
    with tempfile.TemporaryDirectory(prefix="gsplit-disk-") as folder:
        disk = measure_disk(Path(folder), max(2000, int(50_000 * scale)))
    progress("calibrate", 3, 3)
    latency, more = first.comm["latency_s"], second.comm["latency_s"]
    rates = first.kernels
    return Hardware(
        name="this",
        far_sample_edges_per_s=rates["sample_edges_per_s"],
        cache_bytes_per_s=rates["load_bytes_per_s"],
        disk_reads_per_s=disk.reads_per_s,
        disk_bytes_per_s=disk.bytes_per_s,
        exchange_bytes_per_s=first.comm["exchange_bytes_per_s"],
        reduce_bytes_per_s=first.comm["reduce_bytes_per_s"],
        collective_s=latency,
        collective_per_rank_s=max(0.0, (more - latency) / (many - few)) if many > few else 0.0,
        sample_s=_SAMPLE_S,
        split_s=_SPLIT_S,
        load_s=_LOAD_S,
        step_s=_STEP_S,
        attention_step_s=_ATTENTION_STEP_S,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cores=len(os.sched_getaffinity(0)),
        thread_gain=first.thread_gain,
        **rates,
    )


def _run_ranks(num_ranks: int, scale: float, *, kernels: bool) -> _Measured:
    with tempfile.TemporaryDirectory(prefix="gsplit-calibration-") as name:
        program = [sys.executable, "-P", "-m", "gsplit.planner.rank_probes", name, str(scale)]
        launch([*program, "yes" if kernels else "no"], num_ranks)
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(Path(name).glob("rank-*.json"))]
    return _Measured(
        _medians([rank["kernels"] for rank in found]) if kernels else {},
        _medians([rank["comm"] for rank in found]),
        max(rank["thread_gain"] for rank in found),
    )


def _medians(documents: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(document[name] for document in documents) for name in documents[0]}
