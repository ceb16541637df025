"""What torch and Triton read from the environment, set for a process whose model is on a device.

Whatever the user has set is kept. Called by ``gsplit.init`` before anything is allocated or compiled.
"""

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["prepare_environment"]

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its name before torch 2.9
_TRITON = ("TRITON_CACHE_DIR", "TRITON_HOME")


def prepare_environment() -> None:
    """Set how torch allocates memory of devices, and where Triton keeps compiled kernels."""
    if not any(name in os.environ for name in _ALLOCATOR):
        for name in _ALLOCATOR:
            os.environ[name] = "expandable_segments:True"  # sizes change with every step
    folder = Path(tempfile.gettempdir()) / f"gsplit-triton-{os.getuid()}"
    if not any(name in os.environ for name in _TRITON) and _can_keep_code(folder):
        # in the home folder, which hosts may share, ranks of several hosts replace each other's files while they load
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def _can_keep_code(folder: Path) -> bool:
    """Whether a folder is there, or can be made, that only this user can write, and code can be loaded from."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not what a link of somebody else points to
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        return is_private and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False
