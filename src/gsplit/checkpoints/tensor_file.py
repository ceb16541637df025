"""Named tensors and some text in one file: the safetensors format, with a checksum over all of it.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {name: text}, tensor: {"dtype", "shape", "data_offsets"}}, padded with blanks
    data      the tensors' bytes, one after the other, without gaps

Any reader of safetensors opens it. ``sha256`` in the metadata is that of the header without it, as canonical JSON, and
of the data. A file is written under another name, flushed to the disk and renamed: under its own name it is whole.
Reading trusts nothing: sizes are compared with the file's length before memory is taken, and the sum at the end.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic
from gsplit.free_memory import free_bytes
from gsplit.untrusted import Expected, open_regular

__all__ = [
    "STORED_DTYPES",
    "NotOpenedError",
    "TensorFile",
    "check_tensor_file",
    "open_tensor_file",
    "read_tensor_file",
    "write_tensor_file",
]

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
STORED_DTYPES = frozenset(_NAMES)
"""Types of tensors that can be written."""
_MAX_HEADER_BYTES = 16 << 20  # JSON takes twenty times as much memory
_ALWAYS_READ_BYTES = 1 << 30  # in a container, files that the system keeps in memory count as used
_NOT_THE_FILE = (errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REFUSED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError)
_EXPECTED = Expected("tensors as they were written", "use another checkpoint: this file is damaged")


class NotOpenedError(InputError):
    """A file could not be opened for a reason outside it, such as too many open files: it may well be whole."""


@dataclass(frozen=True)
class TensorFile:
    """What a file holds."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


@dataclass(frozen=True)
class _Header:
    """What a file says of itself, not yet checked; ``num_bytes`` with the length in front of it."""

    num_bytes: int
    tensors: dict[str, dict[str, object]]
    texts: dict[str, str]
    sha256: str


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors of the CPU and texts; ``path`` is there with all of it, or is what it was before."""
    header: dict[str, object] = {}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each one aligned
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    pieces = [_bytes_of(tensor) for _, tensor in ordered]
    total = hashlib.sha256(_canonical({**header, "__metadata__": dict(texts)}))
    for piece in pieces:
        total.update(piece)
    head = _canonical({**header, "__metadata__": {**texts, "sha256": total.hexdigest()}})
    head += b" " * (-len(head) % 8)
    if len(head) > _MAX_HEADER_BYTES:
        expected, fix = f"at most {_MAX_HEADER_BYTES} bytes beside the tensors", "keep large values in tensors"
        raise InputError(explain(path, expected, len(head), fix))
    write_atomic(path, [len(head).to_bytes(8, "little"), head, *pieces])


def _bytes_of(tensor: Tensor) -> memoryview:
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _canonical(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def open_tensor_file(path: Path, *, follow: bool = True) -> tuple[BinaryIO, int]:
    """A file for reading, and its length; what is no regular file is refused. Close it after use.

    Without ``follow``, a link is refused: for files that nobody named.
    """
    try:
        descriptor = open_regular(path, follow=follow)
    except OSError as error:
        if error.errno in _NOT_THE_FILE:
            fix = "see to that and try again: nothing was changed"
            raise NotOpenedError(explain(path, "a file that can be opened", error.strerror, fix)) from None
        raise InputError(explain(path, "a regular file", error.strerror, "check the path")) from None
    return os.fdopen(descriptor, "rb"), os.fstat(descriptor).st_size


def check_tensor_file(stream: BinaryIO, size: int, path: Path) -> None:
    """Refuse a file that cannot be whole, or is larger than memory, before its data is read; for a stream at 0."""
    try:
        header = _read_header(stream, size)
        _entries(header.tensors, size - header.num_bytes)
    except _REFUSED as error:
        raise _EXPECTED.refuse(path, f"{type(error).__name__}: {error}") from None
    stream.seek(0)
    needed, free = 2 * size, max(free_bytes(), _ALWAYS_READ_BYTES)  # its bytes, and the tensors made of them
    if needed > free:
        fix = "free memory, or use another checkpoint"
        raise InputError(explain(path, f"a file to read in {free} bytes of memory", f"one that takes {needed}", fix))


def read_tensor_file(stream: BinaryIO, size: int, path: Path) -> TensorFile:
    """Read and check all of a file, given its length and, for messages, its name."""
    try:
        return _read(stream, size)
    except _REFUSED as error:
        raise _EXPECTED.refuse(path, f"{type(error).__name__}: {error}") from None


def _read(stream: BinaryIO, size: int) -> TensorFile:
    header = _read_header(stream, size)
    total = hashlib.sha256(_canonical({**header.tensors, "__metadata__": header.texts}))
    tensors = {}
    for entry in _entries(header.tensors, size - header.num_bytes):
        tensors[entry.name] = _read_tensor(stream, entry)
        total.update(_bytes_of(tensors[entry.name]))
    if total.hexdigest() != header.sha256:
        raise ValueError("the checksum differs")
    if not all(isinstance(text, str) for text in header.texts.values()):
        raise ValueError("metadata that is no text")
    return TensorFile(tensors, header.texts)


def _read_header(stream: BinaryIO, size: int) -> _Header:
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    tensors = json.loads(stream.read(length))
    texts = tensors.pop("__metadata__")
    return _Header(8 + length, tensors, texts, texts.pop("sha256"))


def _entries(header: dict[str, dict[str, object]], num_bytes: int) -> list[_Entry]:
    """The tensors in the order of the file; they must fill the data without gaps, whatever the header says."""
    entries = []
    for name, entry in header.items():
        dtype, shape, (start, stop) = _DTYPES[str(entry["dtype"])], entry["shape"], _pair(entry["data_offsets"])
        if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError(f"{name}: a shape of {shape}")
        if stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {stop - start} bytes for {dtype} {shape}")
        entries.append(_Entry(name, dtype, tuple(shape), start, stop))
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    ends = [0, *(entry.stop for entry in entries)]
    if [entry.start for entry in entries] != ends[:-1] or ends[-1] != num_bytes:
        raise ValueError(f"tensors that do not fill the {num_bytes} bytes behind the header")
    return entries


def _pair(offsets: object) -> tuple[int, int]:
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(place) is int for place in offsets)):
        raise ValueError(f"offsets of {offsets}")
    return offsets[0], offsets[1]


def _read_tensor(stream: BinaryIO, entry: _Entry) -> Tensor:
    raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    if stream.readinto(raw.numpy()) != raw.numel():  # type: ignore[attr-defined]
        raise ValueError(f"{entry.name}: the file ends within it")
    return raw.view(entry.dtype).reshape(entry.shape)
