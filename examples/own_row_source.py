"""A source of rows of one's own: features that lie compressed in blocks, under the hot cache of any other source.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
gsplit partition demo.gsplit demo8.gsplit --parts 8 --fanout 10,10
python examples/own_row_source.py demo8.gsplit

A source implements ``HostSource`` of gsplit.features.protocol: the shape and type of a row, and ``place``, which copies
rows by id to where they are wanted. A database, an object store or a decoder can stand there. Everything above, caches,
conversion and loading, goes through that protocol. These modules are internal and may move; ``NeighborLoader`` opens
the store's own sources and does not take one yet.
"""

import argparse
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import gsplit
from gsplit.feature_tiers import cached_order
from gsplit.features.cached import CachedRows
from gsplit.features.protocol import RowsRead, take_rows

Ids = npt.NDArray[np.int64]


class CompressedRows:
    """Rows of float32 in blocks that are compressed by themselves; a read unpacks the blocks it needs, once each."""

    dtype = torch.float32

    def __init__(self, rows: npt.NDArray[np.float32], rows_per_block: int = 64) -> None:
        self.row_shape, self._per_block = rows.shape[1:], rows_per_block
        pieces = range(0, len(rows), rows_per_block)
        self._blocks = [zlib.compress(rows[start : start + rows_per_block].tobytes()) for start in pieces]
        self.unpacked = 0

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._blocks))

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        """Copy the row of ``ids[k]`` to ``out[places[k]]``, or to ``out[k]`` without places."""
        where = np.arange(ids.size) if places is None else places
        blocks = ids // self._per_block
        num_bytes = 0
        for block in np.unique(blocks):
            chosen = np.flatnonzero(blocks == block)
            packed = self._blocks[block]
            rows = np.frombuffer(bytearray(zlib.decompress(packed)), np.float32).reshape(-1, *self.row_shape)
            out[torch.from_numpy(where[chosen])] = torch.from_numpy(rows[ids[chosen] % self._per_block])
            self.unpacked += 1
            num_bytes += len(packed)
        return RowsRead(ids.size, num_bytes)

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        """The same to any device: through the host's memory."""
        there = torch.empty(ids.numel(), *self.row_shape)
        done = self.place(ids.cpu().numpy(), None, there)
        out.copy_(there)
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="partitioned: it knows its hottest rows")
    options = parser.parse_args()
    store = gsplit.open(options.store)
    stored = np.asarray(store.stored_array("features/x"))
    rows = CompressedRows(stored)
    print(f"{stored.nbytes:,} bytes, compressed {rows.num_bytes:,}")

    order = cached_order(store, 0, store.num_vertices, ["x"], stored.nbytes // 4)  # a quarter, the hottest rows
    cached = CachedRows(rows, order)
    hotness = torch.from_numpy(np.array(store.stored_array("hotness"), np.float64))
    ids = torch.multinomial(hotness, 500, generator=torch.Generator().manual_seed(0))  # as training would ask
    for name, source in (("without a cache", rows), ("with a cache", cached)):
        before, out = rows.unpacked, torch.empty(ids.numel(), *rows.row_shape)
        done = source.read(ids, out)
        print(f"{name}: {done.hits} of {done.rows} rows from memory, {rows.unpacked - before} blocks unpacked")
    same = torch.equal(take_rows(cached, ids, torch.device("cpu")), torch.from_numpy(stored[ids.numpy()]))
    print("the rows that the store holds:", same)


if __name__ == "__main__":
    main()
