"""What an input may do to us: be read, or be refused in the usual form. Everything else is a finding.

A finding is any error that is not ours, a refusal in another form, more time or memory than the bounds, and a file
opened outside the folder that was given.
"""

import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Protocol

from gsplit.errors import GSplitError

__all__ = ["Finding", "Guard", "Surface", "attempt", "limit_memory"]

_USUAL = re.compile(r"[^\n]*: expected [^\n]+ \(got [^\n]*\)\. Fix: [^\n]+\.", re.DOTALL)
_MOST_CHARACTERS = 8000
_CPU_SECONDS, _SECONDS = 10.0, 60.0  # of work, and of waiting, which a busy machine makes longer


class Surface(Protocol):
    """One kind of input. Made once per process, in a folder of its own."""

    def attempt(self, random: Random) -> None:
        """Make an input and read it."""


@dataclass(frozen=True)
class Finding:
    """What an input did that it must not; ``number`` makes it again."""

    surface: str
    number: int
    what: str


class _TooLong(BaseException):
    pass


class Guard:
    """Watches which files this process opens; an audit hook stays for as long as the process."""

    def __init__(self) -> None:
        self._inside: str | None = None
        self._trespasses: list[str] = []
        own = (
            sys.prefix,
            sys.base_prefix,
            str(Path(os.__file__).parent),
            "/proc/",
            "/sys/fs/cgroup",
            "/usr/share/zoneinfo",
        )
        sources = str(Path(__file__).resolve().parents[2] / "src")
        self._ours = tuple(os.path.realpath(path) for path in (*own, sources))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self._inside is None or isinstance(arguments[0], int) or arguments[0] is None:
            return
        path = os.fsdecode(arguments[0])
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if not path.startswith("/"):  # below a descriptor of a folder
            inside = ".." not in path.split("/")
        else:
            real = os.path.normpath(path) if flags & os.O_NOFOLLOW else os.path.realpath(path)
            inside = real.startswith((self._inside + "/", *self._ours)) or real == self._inside
        if not inside:
            self._trespasses.append(path)

    @contextmanager
    def watch(self, folder: Path) -> Iterator[None]:
        """Within, only files below ``folder`` may be opened, and the libraries' own."""
        self._inside = os.path.realpath(folder)
        self._trespasses.clear()
        try:
            yield
        finally:
            self._inside = None

    @property
    def trespasses(self) -> list[str]:
        """Files that were opened outside."""
        return list(self._trespasses)


@contextmanager
def _timed() -> Iterator[None]:
    """Raise when an input takes too much time, working or waiting."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, _CPU_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, _SECONDS))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def limit_memory(num_bytes: int) -> int:
    """Let this process allocate so much more, and no more; returns the limit of its address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return most


def attempt(name: str, surface: Surface, number: int, guard: Guard, folder: Path) -> tuple[bool, Finding | None]:
    """Try the input of a number: whether it was refused, and what is wrong, if anything."""
    refused, what = False, None
    random = Random(f"{name}/{number}")
    try:
        with warnings.catch_warnings(), guard.watch(folder), _timed():
            warnings.simplefilter("error")
            surface.attempt(random)
    except GSplitError as error:
        refused, what = True, _describe_form(str(error))
    except _TooLong:
        what = f"more than {_SECONDS} s\n{traceback.format_exc()}"
    except Exception:
        what = traceback.format_exc()
    if guard.trespasses:
        what = f"opened {guard.trespasses}"
    return refused, None if what is None else Finding(name, number, what)


def _describe_form(message: str) -> str | None:
    if _USUAL.fullmatch(message) and message.isprintable() and len(message) <= _MOST_CHARACTERS:
        return None
    return f"a refusal in another form: {message[:1000]!r}"
