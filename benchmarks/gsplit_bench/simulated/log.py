"""What the simulated device saw: host waits by file and line, launches, and bytes over the bus."""

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

import gsplit

__all__ = ["DeviceCounts", "DeviceLog", "calling_line", "is_called_by_torch"]

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_FUNCTION_MODE = str(Path(gsplit.__file__).parent / "nn" / "function_mode.py")  # stands between every two lines
_RECORDING = str(Path(gsplit.__file__).parent / "nn" / "checks" / "replay.py")  # the same, in the first steps of a loop
_DEVICES = str(Path(gsplit.__file__).parent / "device" / "devices.py")  # waits for whoever calls it
_SITE_PACKAGES = str(Path(torch.__file__).parents[1])
_PACKAGE = str(Path(gsplit.__file__).parents[1])


def calling_line() -> str:
    """The innermost line outside of torch, the simulation and what waits for others, as ``file:line``; "autograd" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, _FUNCTION_MODE, _RECORDING, _DEVICES, "<")):
            for root in (_PACKAGE, _SITE_PACKAGES):
                name = name.removeprefix(root + "/")
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def is_called_by_torch() -> bool:
    """Whether the caller of the function that asks is a file of torch."""
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


@dataclass(frozen=True)
class DeviceCounts:
    """Amounts up to a moment, or between two: ``after - before``. ``waits`` by ``file:line reason``."""

    waits: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    copies: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0

    @property
    def num_waits(self) -> int:
        """How often the host waited."""
        return sum(self.waits.values())

    def __sub__(self, before: "DeviceCounts") -> "DeviceCounts":
        return DeviceCounts(
            Counter(self.waits) - before.waits,
            self.launches - before.launches,
            self.copies - before.copies,
            self.bytes_to_device - before.bytes_to_device,
            self.bytes_to_host - before.bytes_to_host,
        )


class DeviceLog:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: Counter[str] = Counter()
        self._launches = self._copies = 0
        self._bytes = {"device": 0, "host": 0}

    def wait(self, reason: str) -> None:
        """The host waited for the device."""
        where = f"{calling_line()} {reason}"
        with self._lock:
            self._waits[where] += 1

    def launch(self) -> None:
        """A kernel was launched."""
        with self._lock:
            self._launches += 1

    def copy(self, num_bytes: int, to: Literal["device", "host"]) -> None:
        """Bytes crossed the bus."""
        with self._lock:
            self._copies += 1
            self._bytes[to] += num_bytes

    def counts(self) -> DeviceCounts:
        """Everything up to now."""
        with self._lock:
            return DeviceCounts(
                Counter(self._waits), self._launches, self._copies, self._bytes["device"], self._bytes["host"]
            )
