"""What the server of forked ranks and scripts does before it forks: load kernels, have PyG write its code for layers.

That takes 1.5 s of a core in each process that does it for itself, and tests fork hundreds. No backward: the simulated
device has to be there before the first one of a process.
"""

import gc

from small_graph import BATCH, PLAIN_MODELS, Case, make_model, small_store

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize


def _warm_up() -> None:
    store, _ = small_store("random", 1)
    batch = NeighborLoader(store, [4, 3, -1], "train", batch_size=BATCH, mesh=solo_mesh()).make_batch(0, 0)
    for model in PLAIN_MODELS:
        parallelize(make_model(Case(model, "split", "random", 0.5, None, None)), solo_mesh())(batch.x, batch.edge_index)
    gc.freeze()  # shared with what is forked


_warm_up()
