"""What ranks do in tests/dist/test_ddp.py."""

from typing import Any

import torch
from nn_models import CLASSES, WIDTH, make_batch, make_data
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from gsplit import NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError

__all__ = ["wrap_in_ddp"]


def _message(action: Any) -> str:
    try:
        action()
    except InputError as error:
        return str(error)
    return "nothing was refused"


def wrap_in_ddp(mesh: Mesh) -> dict[str, str]:
    """What is said about DDP around a wrapped model, about DDP inside, and about a batch of another mesh."""
    loader = NeighborLoader(make_data(), [3, 3], torch.arange(20), batch_size=20, mesh=mesh)
    batch = loader.make_batch(0, 0)
    wrapped = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), mesh)
    outside: Any = DistributedDataParallel(wrapped)
    inside: Any = DistributedDataParallel(GraphSAGE(WIDTH, 8, 2, CLASSES).double())
    alone = make_batch(2, mesh=solo_mesh())
    return {
        "outside": _message(lambda: outside(batch.x, batch.edge_index)),
        "inside": _message(lambda: parallelize(inside, mesh)),
        "other mesh": _message(lambda: wrapped(alone.x, alone.edge_index)),
        "alone": _message(lambda: parallelize(wrapped, solo_mesh())(batch.x, batch.edge_index)),
    }
