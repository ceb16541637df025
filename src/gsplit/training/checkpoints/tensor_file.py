"""Named tensors and texts in one file: the safetensors format, with a checksum over all of it.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {name: text}, tensor: {"dtype", "shape", "data_offsets"}}, padded with blanks
    data      the tensors' bytes, one after the other, without gaps

``sha256`` in the metadata is the checksum of the header without it, as canonical JSON, and of the data.

Files are read by the ``safetensors`` package, which checks types, shapes and offsets against the length of the data.
They are read into memory and not memory-mapped: a file on a failing disk, or one that is cut off, is then an error and
not a signal that ends the process. They are written here: the package's writer copies the whole file in memory or
chooses its own temporary name and permissions, and it holds the GIL while training should continue.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.files.places import find_object, write_whole
from gsplit.files.untrusted import Expected, open_regular

__all__ = [
    "MAX_HEADER_BYTES",
    "STORED_DTYPES",
    "NotOpenedError",
    "TensorFile",
    "parse_tensor_file",
    "read_tensor_bytes",
    "write_tensor_file",
]

STORED_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of tensors that can be written and read, by their name in the format."""
MAX_HEADER_BYTES = 16 << 20
"""Longest header; as Python objects, JSON takes twenty times as much memory."""
_ALWAYS_READ_BYTES = 1 << 30  # in a container, the page cache counts as used memory
_NOT_THE_FILE = (errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REFUSED = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError)
_EXPECTED = Expected("tensors as they were written", "use another file: this one is damaged")


class NotOpenedError(InputError):
    """A file could not be opened for a reason outside it, such as too many open files; it may be intact."""


@dataclass(frozen=True)
class TensorFile:
    """The content of a file."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file atomically. Tensors with large elements come first, so that all of them are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    pieces = [_bytes_of(tensor) for _, tensor in ordered]
    header: dict[str, object] = {}
    start = 0
    for (name, tensor), piece in zip(ordered, pieces, strict=True):
        stop = start + piece.nbytes
        header[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    total = hashlib.sha256(_canonical({**header, "__metadata__": dict(texts)}))
    for piece in pieces:
        total.update(piece)
    head = _canonical({**header, "__metadata__": {**texts, "sha256": total.hexdigest()}})
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER_BYTES:
        fix = "keep less beside tensors in the state"
        raise InputError(explain(path, f"at most {MAX_HEADER_BYTES} bytes beside the tensors", len(head), fix))
    write_whole(path, [len(head).to_bytes(8, "little"), head, *pieces])


def _bytes_of(tensor: Tensor) -> memoryview:
    raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _canonical(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def read_tensor_bytes(path: Path, *, follow: bool = True) -> bytes:
    """Read a regular file that fits into memory twice, as its bytes and as tensors.

    Without ``follow``, a symbolic link is refused: for files that the user did not name.
    """
    found = find_object(path)
    if found is not None:
        objects, name = found
        size = objects.size(name) or 0
        _check_memory(objects.where(name), size)
        return objects.read(name, size)
    try:
        descriptor = open_regular(path, follow=follow)
    except OSError as error:
        if error.errno in _NOT_THE_FILE:
            fix = "see to that and try again: nothing was changed"
            raise NotOpenedError(explain(path, "a file that can be opened", error.strerror, fix)) from None
        raise InputError(explain(path, "a regular file", error.strerror, "check the path")) from None
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        _check_memory(path, size)
        return stream.read(size)


def _check_memory(path: object, size: int) -> None:
    free = max(free_bytes(), _ALWAYS_READ_BYTES)
    if 2 * size > free:
        fix = "free memory, or use another file"
        raise InputError(explain(path, f"a file to read in {free} bytes of memory", f"one that takes {2 * size}", fix))


def parse_tensor_file(data: bytes, path: Path) -> TensorFile:
    """The content of a file from its bytes, checked. ``path`` is for error messages."""
    try:
        return _parse(data)
    except _REFUSED as error:
        raise _EXPECTED.refuse(path, f"{type(error).__name__}: {error}") from None


def _parse(data: bytes) -> TensorFile:
    stop = 8 + int.from_bytes(data[:8], "little")
    if not 10 <= stop <= min(8 + MAX_HEADER_BYTES, len(data)):
        raise ValueError(f"a header of {stop - 8} bytes in a file of {len(data)}")
    tensors = load(data)
    header = json.loads(data[8:stop])
    texts = header["__metadata__"]
    sha256 = texts.pop("sha256")
    total = hashlib.sha256(_canonical(header))
    total.update(memoryview(data)[stop:])
    if total.hexdigest() != sha256:
        raise ValueError("the checksum differs")
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(f"{name}: {tensor.dtype}")
    return TensorFile(tensors, texts)
