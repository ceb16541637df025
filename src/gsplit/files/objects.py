"""Folders on object storage: S3, Google Cloud Storage, Azure, and whatever else ``pyarrow.fs`` has a URL for.

An object is read by ranges, and written whole: it appears under its name when all of it has been uploaded. Requests
that are throttled, fail on the server or lose their connection are repeated with growing waits, for a bounded number
of attempts and a bounded time; then the error names the object. Refusals, such as a missing bucket or missing
permission, are errors at once.

Credentials, region and endpoint are those of the SDK: environment variables, profiles, the role of the machine. They
are refused in URLs, so that they are in no message, log or run folder.
"""

import errno
import io
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from gsplit.errors import GSplitError, InputError, MissingDependencyError, UnavailableError, explain

__all__ = ["ObjectFile", "ObjectFolder", "Traffic", "as_url", "shown_place"]

ATTEMPTS = 8
PATIENCE_S = 60.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_CONNECT_S = 5.0
_SILENCE_S = 10.0  # without a byte, until an attempt has failed
_READ_ATTEMPTS = 1  # of the SDK: we repeat requests ourselves, for all kinds of object storage alike
_PART_ATTEMPTS = 4  # for a part of an object, so that the others need not be sent again
_AHEAD_BYTES = 80 << 20  # the SDK copies what it is given until it is sent
_MOST_S3_BYTES = 10_000 * (10 << 20)  # an upload to S3 has at most 10,000 parts, and those of pyarrow have 10 MiB
_MOST_S3_COPIED_BYTES = 5 << 30  # by one request to the server
_URL = re.compile(r"([a-z][a-z0-9+.\-]+):/+(.*)", re.DOTALL)
_REFUSED = re.compile(
    r"ACCESS_DENIED|NO_SUCH_(BUCKET|KEY)|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|HTTP status 4(?!08|29)\d\d"
)
_Result = TypeVar("_Result")


def as_url(place: str | Path) -> str | None:
    """The URL of a place on object storage; None for a path of this host.

    ``Path`` keeps one of the two slashes of a URL; both forms are the same place.

    >>> as_url("s3://bucket/graph.gsplit"), as_url(Path("s3://bucket/graph.gsplit"))
    ('s3://bucket/graph.gsplit', 's3://bucket/graph.gsplit')
    >>> as_url("graph.gsplit"), as_url("/data/graph.gsplit")
    (None, None)
    """
    found = _URL.fullmatch(str(place))
    if found is None:
        return None
    scheme, rest = found.groups()
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        fix = "set them in the environment, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise InputError(explain(f"{scheme}://...", "a URL without credentials", "a URL with some", fix))
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}"


def shown_place(place: Path) -> str:
    """A path or URL for messages: ``Path`` itself shows one slash of a URL."""
    return as_url(place) or str(place)


@dataclass
class Traffic:
    """What was asked of object storage: requests that succeeded, attempts that failed, bytes that were read."""

    requests: int = 0
    failures: int = 0
    num_bytes: int = 0


class ObjectFolder:
    """The objects below a URL. Can be used from any thread; not in a fork of the process that opened it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.traffic = Traffic()
        self._counting = threading.Lock()
        self._opened: dict[str, Any] = {}
        arrow_fs = _load_filesystems()
        try:
            self._fs, self._writing, root = _connect(arrow_fs, self.url)
        except (ValueError, TypeError, OSError) as error:  # ArrowInvalid is a ValueError
            fix = "give a URL such as s3://BUCKET/NAME, and see docs/object-storage.md for regions and endpoints"
            raise InputError(explain(self.url, "object storage that can be used", error, fix)) from None
        self._root = root.rstrip("/")
        self._selector = arrow_fs.FileSelector

    def where(self, name: str) -> str:
        """The URL of an object, for messages."""
        base, mark, query = self.url.partition("?")
        return f"{base}/{name}{mark}{query}"

    def size(self, name: str) -> int | None:
        """The bytes of an object; None if it does not exist."""
        found = self.stat(name)
        return None if found is None else found[0]

    def stat(self, name: str) -> tuple[int, float] | None:
        """The bytes of an object and the time of its last change in seconds; None if it does not exist."""
        info = self._persist(name, lambda: self._fs.get_file_info(f"{self._root}/{name}"))
        return (int(info.size), (info.mtime_ns or 0) / 1e9) if info.is_file else None

    def list_below(self) -> dict[str, tuple[int, float]]:
        """``stat`` of all objects below the folder, by name."""
        selector = self._selector(self._root, allow_not_found=True, recursive=True)
        found = self._persist("", lambda: self._fs.get_file_info(selector))
        return {
            info.path.removeprefix(f"{self._root}/"): (info.size, (info.mtime_ns or 0) / 1e9)
            for info in found
            if info.is_file
        }

    def list(self) -> list[str]:
        """The names of the objects directly in the folder."""
        selector = self._selector(self._root, allow_not_found=True)
        return sorted(
            info.base_name for info in self._persist("", lambda: self._fs.get_file_info(selector)) if info.is_file
        )

    def read(self, name: str, limit: int) -> bytes:
        """A whole object of at most ``limit`` bytes. ``FileNotFoundError`` if it does not exist."""
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.where(name))
        if size > limit:
            fix = "check the URL"
            raise InputError(explain(self.where(name), f"at most {limit} bytes", size, fix))
        return self.read_range(name, 0, size)

    def read_range(self, name: str, begin: int, num_bytes: int) -> bytes:
        """Bytes ``begin .. begin + num_bytes - 1`` of an object."""

        def read() -> bytes:
            data: bytes = self._open(name).read_at(num_bytes, begin) if num_bytes else b""
            if len(data) != num_bytes:
                self._opened.pop(name, None)  # it has another size now
                raise OSError(f"{len(data)} of {num_bytes} bytes from byte {begin} on")
            return data

        data = self._persist(name, read)
        with self._counting:
            self.traffic.num_bytes += num_bytes
        return data

    def _open(self, name: str) -> Any:
        """The object as a file, which takes a request to open."""
        if name not in self._opened:
            self._opened[name] = self._fs.open_input_file(f"{self._root}/{name}")
        return self._opened[name]

    def check_size(self, name: str, num_bytes: int) -> None:
        """Refuse an object that is too large to be written."""
        if self._is_s3 and num_bytes > _MOST_S3_BYTES:
            fix = "write shards, or int8 or float16 features; or copy the folder by other means, such as aws s3 cp"
            expected = f"at most {_MOST_S3_BYTES} bytes, because pyarrow writes 10,000 parts of 10 MiB at most"
            raise InputError(explain(self.where(name), expected, num_bytes, fix))

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write an object. It is there whole or not at all; an existing one is replaced."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        self._write(name, sum(view.nbytes for view in views), lambda: _slices(views))

    def _write(self, name: str, num_bytes: int, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        self.check_size(name, num_bytes)

        def write() -> None:
            stream = self._writing.open_output_stream(f"{self._root}/{name}")
            for piece in pieces():
                stream.write(piece)
                if self._is_s3:  # waits until it has been sent
                    stream.flush()
            stream.close()  # the object appears now; not closed after an error
            found = self._fs.get_file_info(f"{self._root}/{name}").size
            if found != num_bytes:
                raise OSError(f"{found} of {num_bytes} bytes were stored")

        self._opened.pop(name, None)
        self._persist(name, write)

    def rename(self, name: str, new: str) -> None:
        """Give an object another name: it is copied, by the server if it can, then removed."""
        size = self.size(name)
        if self._is_s3 and size is not None and size > _MOST_S3_COPIED_BYTES:
            begins = range(0, size, _AHEAD_BYTES)
            self._write(new, size, lambda: (self.read_range(name, at, min(_AHEAD_BYTES, size - at)) for at in begins))
            self.remove(name)
        else:
            self._persist(name, lambda: self._move(f"{self._root}/{name}", f"{self._root}/{new}"))

    def _move(self, path: str, new: str) -> None:
        try:
            self._fs.move(path, new)
        except OSError:  # perhaps it was done, and the answer was lost
            source, target = self._fs.get_file_info([path, new])
            if source.is_file or not target.is_file:
                raise

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith("s3:")

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        if self.size(name) is not None:
            self._persist(name, lambda: self._fs.delete_file(f"{self._root}/{name}"))

    def _persist(self, name: str, call: Callable[[], _Result]) -> _Result:
        """Repeat a request until it succeeds, is refused, or the attempts or the time are used up."""
        started = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = call()
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "no such object", self.where(name)) from error
            except OSError as error:
                with self._counting:
                    self.traffic.failures += 1
                elapsed = time.monotonic() - started
                refused = isinstance(error, PermissionError) or _REFUSED.search(str(error)) is not None
                if refused or attempt == ATTEMPTS or elapsed > PATIENCE_S:
                    raise self._give_up(name, error, attempt, elapsed, refused=refused) from None
                wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1))
                time.sleep(wait_s * random.SystemRandom().uniform(0.5, 1.0))  # ranks do not come back all at once
            else:
                with self._counting:
                    self.traffic.requests += 1
                return result
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, name: str, error: OSError, attempts: int, elapsed: float, *, refused: bool) -> GSplitError:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if refused:
            fix = "check the bucket, the credentials in the environment and their permissions"
            return InputError(explain(self.where(name), "an object that may be used", text, fix))
        got = f"{text}; {attempts} attempts in {elapsed:.0f} s"
        fix = "check the endpoint and the network, or try again later"
        return UnavailableError(explain(self.where(name), "an answer of object storage", got, fix))


class ObjectFile(io.RawIOBase):
    """An object as a file that can be read and searched, for libraries that take one."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        super().__init__()
        size = folder.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", folder.where(name))
        self._folder = folder
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        num_bytes = max(0, min(target.nbytes, self._size - self._at))
        target[:num_bytes] = self._folder.read_range(self._name, self._at, num_bytes)
        self._at += num_bytes
        return num_bytes


def _slices(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for at in range(0, view.nbytes, _AHEAD_BYTES):
            yield view[at : at + _AHEAD_BYTES]


def _connect(arrow_fs: Any, url: str) -> tuple[Any, Any, str]:
    """The file system of a URL, the one to write objects with, and the path in them.

    Without bounds for S3, a silent server takes minutes to give up.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        filesystem, root = arrow_fs.FileSystem.from_uri(url)
        return filesystem, filesystem, str(root)
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query, strict_parsing=bool(query)))  # endpoint_override, region, scheme
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_override" not in options:  # pyarrow reads it for URLs only
        options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
    has_region = {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys()
    if not has_region and not {"region", "endpoint_override"} & options.keys():
        options["region"] = arrow_fs.resolve_s3_region(path.partition("/")[0])
    bounds = {"connect_timeout": _CONNECT_S, "request_timeout": _SILENCE_S}
    reading, writing = (
        arrow_fs.S3FileSystem(
            **options, **bounds, retry_strategy=arrow_fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
        )
        for attempts in (_READ_ATTEMPTS, _PART_ATTEMPTS)
    )
    return reading, writing, path


def _load_filesystems() -> Any:
    try:
        import pyarrow.fs
    except ImportError:
        fix = "pip install 'gsplit[arrow]'"
        raise MissingDependencyError(explain("object storage", "pyarrow", "no such package", fix)) from None
    return pyarrow.fs
