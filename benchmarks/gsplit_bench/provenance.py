"""Where a measurement comes from: the commit, the versions and the machine, for every document of results."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gsplit

__all__ = ["current_commit", "describe_machine", "installed_versions"]

_PACKAGES = ("torch", "torch_geometric", "numpy", "numba", "dgl", "pyg-lib", "torch-sparse")


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
