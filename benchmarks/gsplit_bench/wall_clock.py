"""A wall clock that jumps, for one run: the machine's clock stays as it is.

``wall_clock.c`` is compiled with ``cc`` and preloaded into every process of the run. It adds a number of seconds to what
they read, and to deadlines that they wait for. The monotonic clock does not jump, as on a real machine.
"""

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gsplit.errors import InputError, explain

__all__ = ["WallClock"]

_SOURCE = Path(__file__).with_suffix(".c")


class WallClock:
    """Compiled into a folder; ``environment`` are the variables of processes that use it, ``seconds`` what
    has been added so far.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            fix = "install a C compiler, or leave the fault clock out with --faults"
            raise InputError(explain("clock", "the command cc", "none", fix))
        folder.mkdir(parents=True)
        library = folder / "wall_clock.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        self._file = folder / "seconds"
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "GSPLIT_WALL_CLOCK": str(self._file)}
        self.seconds = 0
        self._file.write_bytes(struct.pack("=q", 0))

    def jump(self, seconds: int) -> None:
        """Now, in all processes that use it; jumps add up."""
        self.seconds += seconds
        with self._file.open("r+b") as file:  # the file stays: processes have mapped it
            file.write(struct.pack("=q", self.seconds))
