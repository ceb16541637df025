"""What a record says of its origin (commit, versions, machine), clocks of a rank, and the page cache.

Blocked means neither on a core nor in the queue for one: the thread waits for other ranks, or for a disk. Linux keeps
both in ``/proc/thread-self/schedstat``, so the same is measured for every system, whatever it communicates with. Where
there is no such file, time in the queue for a core counts as blocked.
"""

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gsplit
from gsplit.files.mapped_files import files_behind
from gsplit.store.reader import Store

__all__ = ["Clocks", "current_commit", "describe_machine", "forget_features", "installed_versions", "read_clocks"]

_PACKAGES = ("torch", "torch_geometric", "numpy", "numba", "dgl", "pyg-lib", "torch-sparse", "torch-scatter")


def current_commit() -> str | None:
    """The commit of the checkout that this runs from, marked if files have changed; None outside of one."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        tracked = _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-changed" if changed else "") if tracked else None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def installed_versions() -> dict[str, str]:
    """Of everything that a measurement may depend on; what is not installed is left out."""
    found = {"gsplit": gsplit.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, str | int]:
    """The processor, the cores that this process may use, the memory and the system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_SCHEDULED = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Clocks:
    """Readings in seconds, or the difference of two."""

    wall_s: float
    cpu_s: float
    blocked_s: float

    def since(self, start: "Clocks") -> "Clocks":
        """What has passed."""
        return Clocks(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s, self.blocked_s - start.blocked_s)


def read_clocks() -> Clocks:
    """The readings of the calling thread and its process."""
    wall = time.perf_counter()
    try:
        on_core_ns, queued_ns, _ = _SCHEDULED.read_text().split()
        runnable_s = (int(on_core_ns) + int(queued_ns)) / 1e9
    except (OSError, ValueError):
        runnable_s = time.thread_time()
    return Clocks(wall, time.process_time(), wall - runnable_s)


def forget_features(store: Store, names: Sequence[str]) -> None:
    """Put the files of features out of the page cache. Every rank calls it: what one of them has mapped stays."""
    for name in names:
        for mapped in files_behind(store.stored_array(f"features/{name}")):
            mapped.madvise(mmap.MADV_DONTNEED)
        descriptor = os.open(store.path / f"features/{name}.npy", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
