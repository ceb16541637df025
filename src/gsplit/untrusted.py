"""Small files from strangers: settings, run folders, documents. Everything that reads one reads it here.

Only regular files are opened: a named pipe would make us wait and a device would never end. A file is read up to a
bound that its reader states, never further. What a document holds is checked before anybody looks at it: nesting that
would exhaust the stack, numbers that are not finite or do not fit into 64 bits, text of any length in a message.
Refusals are ``InputError`` in the usual form.
"""

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsplit.errors import InputError, explain

__all__ = ["MAX_DEPTH", "Expected", "describe_fault", "open_regular", "parse_json", "read_bounded", "read_document"]

MAX_DEPTH = 64
"""Levels of objects and arrays inside each other; documents of ours have six at most."""
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket"}
_DOCUMENT_BYTES = 1 << 20
_MOST_DOTS = 128  # on a line of TOML: the parser takes time with the square of a dotted key's parts


@dataclass(frozen=True)
class Expected:
    """What a reader wants of a file and what to do where it is something else, for messages."""

    what: str
    fix: str

    def refuse(self, where: object, got: object) -> InputError:
        """The error for a file that is something else."""
        return InputError(explain(where, self.what, _short(got), self.fix))


def _short(got: object) -> str:
    text = str(got)
    return text if len(text) <= 200 else f"{text[:200]}..."


def open_regular(name: str | Path, *, directory: int | None = None, follow: bool = True) -> int:
    """A descriptor of a regular file for reading; an ``OSError`` says what else it is.

    ``name`` is relative to the descriptor ``directory`` if one is given. Without ``follow``, a link is refused.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # not blocking: a named pipe must not hang us
    try:
        file = os.open(name, flags | (0 if follow else os.O_NOFOLLOW), dir_fd=directory)
    except ValueError as error:  # a name with a zero byte
        raise OSError(0, str(error), str(name)) from None
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        raise OSError(0, _KINDS.get(kind, "a device"), str(name))
    return file


def read_bounded(path: Path, limit: int, expected: Expected, *, follow: bool = True) -> bytes:
    """The whole content of a regular file of at most ``limit`` bytes."""
    try:
        file = open_regular(path, follow=follow)
    except OSError as error:
        raise expected.refuse(path, error.strerror) from None
    with os.fdopen(file, "rb") as stream:
        size = os.fstat(file).st_size
        try:
            data = b"" if size > limit else stream.read(limit + 1)  # files in /proc say that they are empty
        except OSError as error:
            raise expected.refuse(path, error.strerror) from None
    if max(size, len(data)) > limit:
        raise InputError(explain(path, f"at most {limit} bytes", max(size, len(data)), expected.fix))
    return data


def read_document(
    path: Path, expected: Expected, *, toml: bool = False, limit: int = _DOCUMENT_BYTES, follow: bool = True
) -> dict[str, object]:
    """A JSON object or a TOML table from a file, its values checked."""
    data = read_bounded(path, limit, expected, follow=follow)
    found = _parse(_parse_toml, data, path, expected) if toml else parse_json(data, path, expected)
    fault = describe_fault(found)
    if fault is not None:
        raise expected.refuse(path, fault)
    if not isinstance(found, dict):
        raise expected.refuse(path, f"a JSON {type(found).__name__}")
    return found


def parse_json(data: bytes | str, where: object, expected: Expected) -> object:
    """JSON of any kind. Depth and numbers are not checked: see ``describe_fault``."""
    return _parse(json.loads, data, where, expected)


def _parse_toml(text: str) -> dict[str, object]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"more than {_MOST_DOTS} dots on line {number}")
    return tomllib.loads(text)


def _parse(parse: Callable[[str], Any], data: bytes | str, where: object, expected: Expected) -> object:
    try:
        return parse(data if isinstance(data, str) else data.decode())
    except UnicodeDecodeError:
        raise expected.refuse(where, "bytes that are no text") from None
    except RecursionError:
        raise expected.refuse(where, "values nested too deep") from None
    except ValueError as error:  # of the parser, and integers with thousands of digits
        raise expected.refuse(where, error) from None


def describe_fault(document: object) -> str | None:
    """Why the values of a parsed document are refused; None if they are not.

    >>> describe_fault({"a": [1, 2.5, "x", None, True]})
    >>> describe_fault({"a": [1, float("inf")]}), describe_fault({"lr": 10**40})
    ('inf in a', 'a number beyond 64 bits in lr')
    """
    pending: list[tuple[object, int, str]] = [(document, 0, "the document")]
    while pending:
        value, depth, key = pending.pop()
        if depth > MAX_DEPTH:
            return f"values nested deeper than {MAX_DEPTH} levels"
        if isinstance(value, dict):
            pending += [(inner, depth + 1, str(name)) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [(inner, depth + 1, key) for inner in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return f"a number beyond 64 bits in {key[:80]}"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{value} in {key[:80]}"
    return None
