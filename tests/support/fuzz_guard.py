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

import numba

from gsplit.errors import GSplitError

__all__ = ["SECONDS", "Finding", "Guard", "Surface", "attempt", "limit_memory"]

_USUAL = re.compile(r"[^\n]*: expected [^\n]+ \(got [^\n]*\)\. Fix: [^\n]+\.", re.DOTALL)
_MOST_CHARACTERS = 8000
SECONDS = 60.0
"""For an input; work takes less than one, a busy machine makes it longer."""


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
        self._folder = ""
        self._trespasses: list[str] = []
        own = (
            sys.prefix,
            sys.base_prefix,
            str(Path(os.__file__).parent),
            "/proc/",
            "/sys/fs/cgroup",
            "/usr/share/zoneinfo",
            *([numba.config.CACHE_DIR] if numba.config.CACHE_DIR else ()),  # a kernel may be compiled meanwhile
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
        """Within, ``attempt`` may open files below ``folder``, and the libraries' own; warnings are errors."""
        self._folder = os.path.realpath(folder)
        before = signal.signal(signal.SIGALRM, _stop)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                yield
            finally:
                signal.signal(signal.SIGALRM, before)

    def attempt(self, surface: Surface, random: Random) -> None:
        """Try one input, for a while."""
        self._inside = self._folder
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            surface.attempt(random)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._inside = None

    def trespasses(self) -> list[str]:
        """Files that were opened outside since this was asked last."""
        found, self._trespasses = self._trespasses, []
        return found


def _stop(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def limit_memory(num_bytes: int) -> int:
    """Let this process allocate so much more, and no more; returns the limit of its address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return most


def attempt(name: str, surface: Surface, number: int, guard: Guard) -> tuple[bool, Finding | None]:
    """Try the input of a number, within ``guard.watch``: whether it was refused, and what is wrong, if anything."""
    refused, what = False, None
    try:
        guard.attempt(surface, Random(f"{name}/{number}"))
    except GSplitError as error:
        refused, what = True, _describe_form(str(error))
    except _TooLong:
        what = f"more than {SECONDS} s\n{traceback.format_exc()}"
    except Exception:
        what = traceback.format_exc()
    if trespasses := guard.trespasses():
        what = f"opened {trespasses}"
    return refused, None if what is None else Finding(name, number, what)


def _describe_form(message: str) -> str | None:
    if _USUAL.fullmatch(message) and message.isprintable() and len(message) <= _MOST_CHARACTERS:
        return None
    return f"a refusal in another form: {message[:1000]!r}"
