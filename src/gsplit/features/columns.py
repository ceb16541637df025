"""Some columns of all rows, held in memory: what a rank has of the features under ``push_pull``.

Rows are stored one after the other, so columns of a row cannot be read alone from a file; they are copied out once,
when the loader is made.
"""

import torch

from gsplit.errors import InputError, explain
from gsplit.features.mapped import MappedRows
from gsplit.features.protocol import HostSource, RowSource

__all__ = ["column_range", "hold_columns"]

_PIECE_BYTES = 1 << 26


def column_range(num_columns: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First column of a rank and one past its last.

    >>> [column_range(10, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return num_columns * rank // num_ranks, num_columns * (rank + 1) // num_ranks


def hold_columns(source: HostSource, num_vertices: int, rank: int, num_ranks: int) -> RowSource:
    """A rank's columns of the rows of all vertices; read in pieces."""
    if len(source.row_shape) != 1 or source.row_shape[0] < num_ranks:
        expected = f"features of one dimension, with a column for each of {num_ranks} ranks"
        raise InputError(explain("push_pull", expected, f"rows of {list(source.row_shape)}", "use another strategy"))
    first, stop = column_range(source.row_shape[0], rank, num_ranks)
    held = torch.empty(num_vertices, stop - first, dtype=source.dtype)
    piece = max(1, _PIECE_BYTES // (source.row_shape[0] * source.dtype.itemsize))
    for start in range(0, num_vertices, piece):
        ids = torch.arange(start, min(start + piece, num_vertices))
        rows = torch.empty(ids.numel(), *source.row_shape, dtype=source.dtype)
        source.read(ids, rows)
        held[start : start + ids.numel()] = rows[:, first:stop]
    bits = held.view({1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[source.dtype.itemsize])
    return MappedRows("columns of the features", bits.numpy(), source.dtype, 0)
