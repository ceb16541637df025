"""What sources that write to the host's memory share: checked ids, and tensors as plain arrays of words."""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.features.protocol import HostSource, RowsRead

__all__ = ["check_ids", "flat_rows", "kernel_places", "read_to_device"]

Ids = npt.NDArray[np.int64]


def read_to_device(source: HostSource, ids: Tensor, out: Tensor) -> RowsRead:
    """``RowSource.read`` of a host source; rows for another device are copied there."""
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    read = source.place(ids.cpu().numpy(), None, host)
    if host is not out:
        out.copy_(host)
    return read


def check_ids(name: str, ids: Ids, first_id: int, num_rows: int) -> None:
    """Refuse ids of rows that are not held, before they become addresses."""
    if ids.size and not first_id <= int(ids.min()) <= int(ids.max()) < first_id + num_rows:
        expected = f"ids in {first_id}..{first_id + num_rows - 1}, which are held here"
        raise InputError(explain(name, expected, f"{ids.min()}..{ids.max()}", "open the store that holds them"))


def flat_rows(out: Tensor, bits: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """A host tensor's memory as one row of words of type ``bits``, and how many words its rows are apart.

    >>> wide = torch.zeros(3, 5)
    >>> flat, stride = flat_rows(wide[:, 1:3], np.dtype(np.uint32))
    >>> flat.shape, stride
    ((12,), 5)
    """
    rows, columns = out.size(0), prod(out.shape[1:])
    assert out.device.type == "cpu" and (rows == 0 or out[0].is_contiguous()), (out.device, out.stride())
    stride = out.stride(0) if rows > 1 and columns else columns
    words = out.view(torch.uint16) if out.dtype == torch.bfloat16 else out  # numpy has no bfloat16
    flat = words.as_strided((max(0, rows - 1) * stride + columns if rows else 0,), (1,)).numpy().view(bits)
    return flat, stride * out.element_size() // bits.itemsize


def kernel_places(places: Ids | None) -> Ids:
    """Places as kernels take them: none means that row k goes to place k."""
    return np.empty(0, np.int64) if places is None else places
