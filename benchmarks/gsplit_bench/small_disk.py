"""A disk of its own for one run: an ext4 file system in a file, which can be filled, slowed down and stopped.

Needs root, a loop device and the commands ``mkfs.ext4``, ``mount`` and ``fsfreeze``; to slow it down, the controller
blkio of cgroups v1, in which the limit holds for this device alone.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from gsplit.errors import InputError, explain

__all__ = ["SmallDisk"]

_BYTES = 256 << 20  # a log of 1.7 kB per step and rank has room
_RATES = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_COMMANDS = ("mkfs.ext4", "mount", "umount", "fsfreeze", "losetup")


class SmallDisk:
    """Use with ``with``: mounted as ``folder`` inside, and gone afterwards."""

    def __init__(self, place: Path) -> None:
        missing = [name for name in _COMMANDS if shutil.which(name) is None]
        if os.geteuid() != 0 or missing or not _RATES.exists():
            fix = "run as root where these are, or leave faults of the disk out with --faults"
            got = ", ".join(missing) + " missing" if missing else "not root, or no such controller"
            raise InputError(explain("disk", f"root, {', '.join(_COMMANDS)} and {_RATES}", got, fix))
        self._image = place / "disk.ext4"
        self._filler: Path | None = None
        self.folder = place / "disk"

    def __enter__(self) -> "SmallDisk":
        self.folder.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(_BYTES)
        _run("mkfs.ext4", "-q", "-m", "0", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.repair()
        _run("umount", "--lazy", str(self.folder))  # what was just killed may still hold a file
        self._image.unlink()

    def fill(self) -> None:
        """Until not a byte more can be written."""
        self._filler = self.folder / "filler"
        for size in (1 << 20, 1 << 12, 1):
            with self._filler.open("ab", buffering=0) as file:
                _write_until_full(file.fileno(), size)

    def set_rate(self, bytes_per_s: int) -> None:
        """Let no more be written in a second; 0: any number."""
        device = self.folder.stat().st_dev
        _RATES.write_text(f"{os.major(device)}:{os.minor(device)} {bytes_per_s}")

    def freeze(self) -> None:
        """Let every write wait, until ``repair``."""
        _run("fsfreeze", "--freeze", str(self.folder))

    def repair(self) -> None:
        """End all of that; what has not happened is passed over."""
        subprocess.run(["fsfreeze", "--unfreeze", self.folder], capture_output=True, check=False)
        self.set_rate(0)
        if self._filler is not None:
            self._filler.unlink()
            self._filler = None


def _write_until_full(file: int, size: int) -> None:
    try:
        while os.write(file, bytes(size)):
            pass
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "loop devices must be allowed here, or leave faults of the disk out with --faults"
        raise InputError(explain("disk", " ".join(command), done.stderr.strip(), fix))
