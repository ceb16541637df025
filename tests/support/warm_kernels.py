"""Imports everything and compiles the kernels that most tests use, once, before many processes would do it at a time.

For CI, which starts from a new environment: no bytecode, no compiled kernels. `make test WARM=1` runs it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from small_graph import Case, train_cases

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

if __name__ == "__main__":
    train_cases(solo_mesh(), [Case("gcn", "split", "random", 0.5, None, "batch_norm", edge_values=True)], 1)
    with TemporaryDirectory() as folder:
        graph = PlantedGraph(1500, 15_000, num_communities=12, num_features=8, num_classes=4)
        store = build_store(synthetic_source(graph), Path(folder) / "g.gsplit")
        parted = gsplit.partition(
            store, Path(folder) / "p.gsplit", 4, [4, 4], batch_size=128, solver="restream", epochs=1
        )
        gsplit.NeighborLoader(parted, [4, 4], "train", batch_size=128, cache=1000, features_on_disk=True).make_batch(
            0, 0
        )
