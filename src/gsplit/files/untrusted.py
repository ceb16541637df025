"""Safe parsing of small untrusted files: settings, run folders, documents. All of them are read here.

Only regular files are opened: a named pipe would block and a device may not end. A file is read up to a limit that the
caller sets. The values of a document are checked before they are used: nesting that would exhaust the stack, numbers
that are not finite or do not fit into 64 bits. Long values are shortened in messages. Errors are ``InputError``.
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
"""Largest nesting of objects and arrays. Documents that GSplit writes have at most six levels."""
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket"}
_DOCUMENT_BYTES = 1 << 20
_MAX_DOTS = 128  # per line of TOML: the parser needs time quadratic in the parts of a dotted key


@dataclass(frozen=True)
class Expected:
    """The expected content of a file and the fix for other content, for messages."""

    what: str
    fix: str

    def refuse(self, where: object, got: object) -> InputError:
        """The error for a file with other content."""
        return InputError(explain(where, self.what, _short(got), self.fix))


def _short(got: object) -> str:
    text = str(got)
    return text if len(text) <= 200 else f"{text[:200]}..."


def open_regular(name: str | Path, *, directory: int | None = None, follow: bool = True) -> int:
    """Open a regular file for reading and return its descriptor. Other kinds of files raise ``OSError``.

    ``name`` is relative to the descriptor ``directory`` if one is given. Without ``follow``, a link is refused.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # without O_NONBLOCK, a named pipe would block
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
    """Read a whole regular file of at most ``limit`` bytes."""
    try:
        file = open_regular(path, follow=follow)
    except OSError as error:
        raise expected.refuse(path, error.strerror) from None
    with os.fdopen(file, "rb") as stream:
        size = os.fstat(file).st_size
        try:
            data = b"" if size > limit else stream.read((size or limit) + 1)  # files in /proc have size 0
        except OSError as error:
            raise expected.refuse(path, error.strerror) from None
        except MemoryError:
            raise expected.refuse(path, f"{size:,} bytes, more than the memory left") from None
    if max(size, len(data)) > limit:
        raise InputError(explain(path, f"at most {limit} bytes", max(size, len(data)), expected.fix))
    return data


def read_document(
    path: Path, expected: Expected, *, toml: bool = False, limit: int = _DOCUMENT_BYTES, follow: bool = True
) -> dict[str, object]:
    """Read a JSON object or a TOML table from a file and check its values."""
    data = read_bounded(path, limit, expected, follow=follow)
    found = _parse(_parse_toml, data, path, expected) if toml else parse_json(data, path, expected)
    fault = describe_fault(found)
    if fault is not None:
        raise expected.refuse(path, fault)
    if not isinstance(found, dict):
        raise expected.refuse(path, f"a JSON {type(found).__name__}")
    return found


def parse_json(data: bytes | str, where: object, expected: Expected) -> object:
    """Parse any JSON value. Depth and numbers are not checked: see ``describe_fault``."""
    return _parse(json.loads, data, where, expected)


def _parse_toml(text: str) -> dict[str, object]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise ValueError(f"more than {_MAX_DOTS} dots on line {number}")
    return tomllib.loads(text)


def _parse(parse: Callable[[str], Any], data: bytes | str, where: object, expected: Expected) -> object:
    try:
        return parse(data if isinstance(data, str) else data.decode())
    except UnicodeDecodeError:
        raise expected.refuse(where, "bytes that are not UTF-8 text") from None
    except RecursionError:
        raise expected.refuse(where, "values nested too deep") from None
    except ValueError as error:  # of the parser, and integers with thousands of digits
        raise expected.refuse(where, error) from None


def describe_fault(document: object) -> str | None:
    """The reason why the values of a parsed document are refused, or None.

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
