"""The machine: versions, memory, disk, limits of a process, threads and the allocator."""

import importlib.metadata
import os
import platform
import resource
import shutil
from pathlib import Path

from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit.doctor.finding import Finding, amount
from gsplit.files.host_limits import free_bytes, total_bytes, usable_cores

__all__ = ["check_allocator", "check_disk", "check_limits", "check_memory", "check_threads", "check_versions"]

_NEEDED = ("gsplit", "torch", "torch_geometric", "numpy", "numba", "pymetis", "pydantic", "typer", "rich")
_OPTIONAL = ("pyarrow", "mtkahypar", "matplotlib", "triton")
_LEAST_FREE_BYTES = 2 << 30
_LEAST_DISK_BYTES = 5 << 30
_LEAST_FILES = 1024
_LEAST_SHM_BYTES = 64 << 20


def check_versions(device: str | None = None) -> Finding:
    """Check that everything is installed that GSplit needs; with a GPU, also its name and the versions of CUDA."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    missing = []
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                missing.append(name)
    if device is not None and device.startswith("cuda"):
        found |= _cuda_versions()
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        text = f"{versions}; not installed: {', '.join(missing)}"
        return Finding("versions", "error", text, "pip install --upgrade gsplit")
    return Finding("versions", "ok", versions)


def _cuda_versions() -> dict[str, str]:
    import torch

    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"cuda": str(torch.version.cuda), "nccl": nccl, "GPU": names}


def check_memory() -> Finding:
    """Check how much memory is free."""
    free = free_bytes()
    total = total_bytes()
    text = f"{amount(free)} free of {amount(total)}"
    figures = {"free_bytes": float(free), "total_bytes": float(total)}
    if free < _LEAST_FREE_BYTES:
        fix = "end other programs; gsplit inspect STORE --memory forecasts what a run holds"
        return Finding("memory", "warning", text, fix, figures)
    return Finding("memory", "ok", text, figures=figures)


def check_disk(place: Path) -> Finding:
    """Check the space where runs and outputs are written."""
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return Finding("disk", "error", f"{place}: {error.strerror}", "check the path and its permissions")
    text = f"{amount(usage.free)} free at {place}"
    figures = {"free_bytes": float(usage.free)}
    if usage.free < _LEAST_DISK_BYTES:
        return Finding("disk", "warning", text, "free space, or give --out another place", figures)
    return Finding("disk", "ok", text, figures=figures)


def check_limits() -> list[Finding]:
    """Check the limits of one process: open files, locked memory, /dev/shm."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = [Finding("open files", "ok", _limit(files), figures={"limit": float(files)})]
    if 0 <= files < _LEAST_FILES:
        lines = [Finding("open files", "warning", _limit(files), f"ulimit -n {_LEAST_FILES}", {"limit": float(files)})]
    text = "unlimited" if locked == resource.RLIM_INFINITY else amount(locked)
    lines.append(Finding("memlock", "ok", f"{text}; matters for GPUs only, where features are pinned"))
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        fix = "mount it, if your own DataLoaders use workers"
        return [*lines, Finding("/dev/shm", "warning", "not mounted; GSplit itself does not need it", fix)]
    size = shared.f_frsize * shared.f_blocks
    text = f"{amount(size)}; GSplit itself needs none of it"
    figures = {"size_bytes": float(size)}
    if size <= _LEAST_SHM_BYTES:
        fix = "docker run --shm-size 1g, if your own DataLoaders use workers"
        return [*lines, Finding("/dev/shm", "warning", text, fix, figures)]
    return [*lines, Finding("/dev/shm", "ok", text, figures=figures)]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} per process"


def check_threads(nproc: int) -> Finding:
    """Check that the ranks have no more threads than there are cores."""
    cores = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if nproc > cores:
        found = f"{cores} cores for {nproc} ranks"
        return Finding("threads", "warning", found, f"use --nproc {cores} at most, or more cores")
    if not (threads.isdecimal() and int(threads)):
        return Finding("threads", "ok", f"{cores} cores, {max(1, cores // nproc)} for each of {nproc} rank(s)")
    if int(threads) * nproc > cores:
        found = f"OMP_NUM_THREADS={threads} for {nproc} rank(s) on {cores} cores"
        return Finding("threads", "warning", found, f"unset it, or export OMP_NUM_THREADS={max(1, cores // nproc)}")
    return Finding("threads", "ok", f"OMP_NUM_THREADS={threads} for {nproc} rank(s) on {cores} cores")


def check_allocator() -> Finding:
    """Check whether memory stays with the process between steps."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "jemalloc" in preloaded or "tcmalloc" in preloaded:
        return Finding("allocator", "ok", f"preloaded: {preloaded}")
    if all(name in os.environ for name in ALLOCATOR):
        return Finding("allocator", "ok", "glibc, tuned to keep its memory")
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    found = "glibc as it is; gsplit train tunes it for itself"
    return Finding(
        "allocator", "ok", found, f"for your own scripts: gsplit.init(tuned_allocator=True), or export {settings}"
    )
