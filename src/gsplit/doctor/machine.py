"""The machine: versions, memory, disk, limits of a process, threads and the allocator."""

import importlib.metadata
import os
import platform
import resource
import shutil
from pathlib import Path

from gsplit.distributed.allocator import ALLOCATOR
from gsplit.doctor.line import Line, amount
from gsplit.free_memory import free_bytes

__all__ = ["check_allocator", "check_disk", "check_limits", "check_memory", "check_threads", "check_versions"]

_NEEDED = ("gsplit", "torch", "torch_geometric", "numpy", "numba", "pymetis", "pydantic", "typer", "rich")
_OPTIONAL = ("pyarrow", "mtkahypar", "matplotlib", "triton")
_LEAST_FREE_BYTES = 2 << 30
_LEAST_DISK_BYTES = 5 << 30
_LEAST_FILES = 1024
_LEAST_SHM_BYTES = 64 << 20


def check_versions() -> Line:
    """Whether everything is installed that GSplit needs."""
    found = {"python": platform.python_version()}
    missing = []
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                missing.append(name)
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        return Line("versions", "error", f"{said}; not installed: {', '.join(missing)}", "pip install --upgrade gsplit")
    return Line("versions", "ok", said)


def check_memory() -> Line:
    """Memory that is free now."""
    free, total = free_bytes(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    said = f"{amount(free)} free of {amount(total)}"
    figures = {"free_bytes": float(free), "total_bytes": float(total)}
    if free < _LEAST_FREE_BYTES:
        fix = "end other programs; gsplit inspect STORE --memory says what a run holds"
        return Line("memory", "warning", said, fix, figures)
    return Line("memory", "ok", said, figures=figures)


def check_disk(place: Path) -> Line:
    """Space where runs and outputs would be written."""
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return Line("disk", "error", f"{place}: {error.strerror}", "check the path and its permissions")
    said, figures = f"{amount(usage.free)} free at {place}", {"free_bytes": float(usage.free)}
    if usage.free < _LEAST_DISK_BYTES:
        return Line("disk", "warning", said, "free space, or give --out another place", figures)
    return Line("disk", "ok", said, figures=figures)


def check_limits() -> list[Line]:
    """What the system lets one process have."""
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = [Line("open files", "ok", _limit(files), figures={"limit": float(files)})]
    if 0 <= files < _LEAST_FILES:
        lines = [Line("open files", "warning", _limit(files), f"ulimit -n {_LEAST_FILES}", {"limit": float(files)})]
    said = "unlimited" if locked == resource.RLIM_INFINITY else amount(locked)
    lines.append(Line("memlock", "ok", f"{said}; matters for GPUs only, where features are pinned"))
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        fix = "mount it, if your own DataLoaders use workers"
        return [*lines, Line("/dev/shm", "warning", "none; GSplit itself needs none", fix)]
    size = shared.f_frsize * shared.f_blocks
    said, figures = f"{amount(size)}; GSplit itself needs none of it", {"size_bytes": float(size)}
    if size <= _LEAST_SHM_BYTES:
        fix = "docker run --shm-size 1g, if your own DataLoaders use workers"
        return [*lines, Line("/dev/shm", "warning", said, fix, figures)]
    return [*lines, Line("/dev/shm", "ok", said, figures=figures)]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} per process"


def check_threads(nproc: int) -> Line:
    """Whether the ranks would get in each other's way."""
    cores, said = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    if nproc > cores:
        found = f"{cores} cores for {nproc} ranks"
        return Line("threads", "warning", found, f"use --nproc {cores} at most, or more cores")
    if not said.isdigit():
        return Line("threads", "ok", f"{cores} cores, {max(1, cores // nproc)} for each of {nproc} rank(s)")
    if int(said) * nproc > cores:
        found = f"OMP_NUM_THREADS={said} for {nproc} rank(s) on {cores} cores"
        return Line("threads", "warning", found, f"unset it, or export OMP_NUM_THREADS={max(1, cores // nproc)}")
    return Line("threads", "ok", f"OMP_NUM_THREADS={said} for {nproc} rank(s) on {cores} cores")


def check_allocator() -> Line:
    """Whether memory stays with the process between steps."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "jemalloc" in preloaded or "tcmalloc" in preloaded:
        return Line("allocator", "ok", f"preloaded: {preloaded}")
    if all(name in os.environ for name in ALLOCATOR):
        return Line("allocator", "ok", "glibc, tuned to keep its memory")
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    found = "glibc as it is; gsplit train tunes it for itself"
    return Line(
        "allocator", "ok", found, f"for your own scripts: gsplit.init(tuned_allocator=True), or export {settings}"
    )
