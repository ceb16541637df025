"""What a rank is doing, in a page of memory that its peers on the same host can read at any moment.

A rank records every collective before it joins it, which one it waits in, the stage of the step it is in, and the state
of its model (training or not, which parameters). Each record costs about a microsecond. In normal operation it is read
for one comparison only: is the collective with this number the same at the peers that have begun it?

The page is an anonymous file (memfd) that peers map through /proc, as they do the segments of shared memory: only the
same user can, and nothing is left behind. The number of a collective is written after its description; a line may be
read half written.

Of every group of ranks there are the last 64 collectives by number, counted from 1, and at which the rank is.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from typing import Literal

__all__ = ["MOST_GROUPS", "Line", "StatusPage", "Waiting", "in_loader_thread", "map_page", "new_page"]

MOST_GROUPS = 64
"""Groups that are written down; a mesh has 5 or 6, and one more for every sampling thread of a loader with prefetch."""
_KEPT = 64
_LINES = ("token", "stage", "loader", "model", "missed")
_LINE = struct.Struct("d248s")  # since when, text
_GROUP = struct.Struct("qqqd")  # last collective begun, the one waited in (0: none), by a loader's thread?, since when
_WAIT, _WAIT_AT = struct.Struct("qqd"), 8  # the last three of them
_NUMBER = struct.Struct("q")
_RECORD = struct.Struct("q248s")  # number of a collective, its description
_FIRST_GROUP = len(_LINES) * _LINE.size
_GROUP_BYTES = _GROUP.size + _KEPT * _RECORD.size
_NUM_BYTES = -(-(_FIRST_GROUP + MOST_GROUPS * _GROUP_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

Line = Literal["token", "stage", "loader", "model", "missed"]
"""What the page is known by, the stage of the thread that trains, of the one that loads ahead, the last model, and who
was missing in a collective that failed.
"""


@dataclass(frozen=True)
class Waiting:
    """A collective that a rank waits in; ``in_loader_thread``: in the thread of a loader that makes batches ahead."""

    group: int
    number: int
    in_loader_thread: bool
    since_s: float


class StatusPage:
    """One rank's page: its owner writes, all ranks read. Times are those of the host's monotonic clock."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def write_line(self, line: Line, text: str) -> None:
        """Replace a line."""
        _LINE.pack_into(self._memory, _LINES.index(line) * _LINE.size, time.monotonic(), text.encode()[:248])

    def begin(self, group: int, number: int, description: str) -> None:
        """The owner is about to join a collective."""
        start = _FIRST_GROUP + group * _GROUP_BYTES
        place = start + _GROUP.size + number % _KEPT * _RECORD.size
        text = place + _NUMBER.size
        # This process may lose its core between two writes, so there is no number until the text is whole.
        self._memory[place:text] = bytes(_NUMBER.size)
        self._memory[text : place + _RECORD.size] = description.encode()[:248].ljust(248, b"\0")
        self._memory[place:text] = _NUMBER.pack(number)
        _GROUP.pack_into(self._memory, start, number, 0, 0, time.monotonic())

    def wait(self, group: int, number: int) -> None:
        """The owner waits in a collective; 0: in none any more."""
        start = _FIRST_GROUP + group * _GROUP_BYTES
        _WAIT.pack_into(self._memory, start + _WAIT_AT, number, in_loader_thread(), time.monotonic())

    def line(self, line: Line) -> tuple[str, float]:
        """A line, and since when it is so."""
        since_s, text = _LINE.unpack_from(self._memory, _LINES.index(line) * _LINE.size)
        return _decode(text), since_s

    def begun(self, group: int) -> int:
        """The number of the last collective of a group that the owner has begun; 0 before the first."""
        return int(_GROUP.unpack_from(self._memory, _FIRST_GROUP + group * _GROUP_BYTES)[0])

    def waits(self) -> list[Waiting]:
        """The collectives that the owner waits in, one per thread at most."""
        found = []
        for group in range(MOST_GROUPS):
            _, number, ahead, since_s = _GROUP.unpack_from(self._memory, _FIRST_GROUP + group * _GROUP_BYTES)
            if number:
                found.append(Waiting(group, number, bool(ahead), since_s))
        return found

    def record(self, group: int, number: int) -> bytes:
        """What is written where a collective has its place: itself, or an older one."""
        place = _FIRST_GROUP + group * _GROUP_BYTES + _GROUP.size + number % _KEPT * _RECORD.size
        return self._memory[place : place + _RECORD.size]

    def description(self, group: int, number: int) -> str | None:
        """What a collective is at the owner; None if it has not begun it, or long ago."""
        held, text = _RECORD.unpack(self.record(group, number))
        return _decode(text) if held == number else None


def in_loader_thread() -> bool:
    """Whether this is the thread of a loader that makes batches ahead, and not the one that trains."""
    return threading.current_thread().name.startswith("gsplit-")


def _decode(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def new_page() -> tuple[StatusPage, int]:
    """An empty page of this process, and the descriptor that peers open it by; -1 if they cannot."""
    try:
        descriptor = os.memfd_create("gsplit-status", os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # not Linux, or not allowed
        return StatusPage(mmap.mmap(-1, _NUM_BYTES)), -1
    os.ftruncate(descriptor, _NUM_BYTES)
    return StatusPage(mmap.mmap(descriptor, _NUM_BYTES)), descriptor


def map_page(process: int, descriptor: int) -> StatusPage:
    """Another process's page."""
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return StatusPage(mmap.mmap(file, _NUM_BYTES, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
