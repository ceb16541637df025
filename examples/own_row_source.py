"""Your own features: compressed rows in memory, under the loader's hot cache.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
gsplit partition demo.gsplit demo8.gsplit --parts 8 --fanout 10,10
torchrun --nproc-per-node 2 examples/own_row_source.py demo8.gsplit

A row source defines the shape and type of a row, and copies rows by original id into a given tensor. It can be a
database, an object store or a decoder. Each rank requests the vertices that it owns. docs/loading.md has the rules.
"""

import argparse
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.extending import RowsRead


class CompressedRows:
    """Rows of float32 in separately compressed blocks. A read decompresses each block that it needs once."""

    dtype = torch.float32

    def __init__(self, rows: npt.NDArray[np.float32], rows_per_block: int = 16) -> None:
        self.row_shape, self._per_block = rows.shape[1:], rows_per_block
        pieces = range(0, len(rows), rows_per_block)
        self._blocks = [zlib.compress(rows[start : start + rows_per_block].tobytes()) for start in pieces]
        self.fingerprint = str(zlib.crc32(rows.tobytes()))  # compared between ranks, and with a checkpoint

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        """Copy the row of ``ids[k]`` to ``out[k]``; return the numbers of rows and bytes read."""
        blocks, num_bytes = ids // self._per_block, 0
        for block in blocks.unique().tolist():
            chosen, packed = (blocks == block).nonzero().view(-1), self._blocks[block]
            unpacked = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=self.dtype)
            out[chosen] = unpacked.view(-1, *self.row_shape)[ids[chosen] % self._per_block]
            num_bytes += len(packed)
        return RowsRead(ids.numel(), num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a partitioned store, which contains the hotness of its rows")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    mesh, store = gsplit.init(), gsplit.open(options.store)
    rows = CompressedRows(store.array("features/x").astype(np.float32))
    cache = store.num_vertices * store.num_features  # bytes per rank: a quarter of all rows
    loader = gsplit.NeighborLoader(store, [5, 5], "train", batch_size=512, mesh=mesh, features=rows, cache=cache)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(*rows.row_shape, 32, num_layers=2, out_channels=store.num_classes), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    for epoch in range(options.epochs):
        losses = trainer.train_epoch()
        counts = [record.counts for record in loader.telemetry.records]
        hits, loaded = (sum(count[name] for count in counts) for name in ("cache_hits", "rows_loaded"))
        if mesh.rank == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f} rows from the cache {hits / loaded:.0%}")
    scores = trainer.evaluate(store, ["test"])  # from the same source
    if mesh.rank == 0:
        print(f"test accuracy {scores['test']:.3f}")


if __name__ == "__main__":
    main()
