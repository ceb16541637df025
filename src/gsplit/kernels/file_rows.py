"""Reading rows of a file from compiled code: many reads without the interpreter's lock and its cost per call."""

import numpy as np
import numpy.typing as npt
from numba import types

from gsplit.kernels.jit import kernel

__all__ = ["read_rows"]

_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


@kernel
def read_rows(
    file: int,
    offset: int,
    row_bytes: int,
    gap: int,
    most: int,
    rows: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    first: int,
    stop: int,
    out: npt.NDArray[np.uint8],
    stride: int,
) -> int:
    """Read ``rows[first:stop]``, ascending, to byte ``places * stride`` of ``out``; return the first that was not read.

    Rows with at most ``gap`` others between them are read together, up to ``most``. Rows and places have been checked.
    """
    together = np.empty(most * row_bytes, np.uint8)
    begin = first
    while begin < stop:
        row, last, end = rows[begin], rows[begin], begin + 1
        while end < stop and rows[end] - last <= gap + 1 and rows[end] - row < most:
            last = rows[end]
            end += 1
        if end == begin + 1:
            address = out.ctypes.data + places[begin] * stride
            if _pread(file, address, row_bytes, offset + row * row_bytes) != row_bytes:
                return begin
        else:
            size = (last - row + 1) * row_bytes
            if _pread(file, together.ctypes.data, size, offset + row * row_bytes) != size:
                return begin
            for at in range(begin, end):
                source, target = (rows[at] - row) * row_bytes, places[at] * stride
                for byte in range(row_bytes):
                    out[target + byte] = together[source + byte]
        begin = end
    return begin
