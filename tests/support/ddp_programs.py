"""What ranks do in tests/dist/test_ddp.py."""

import warnings
from typing import Any

import torch
from nn_models import CLASSES, WIDTH, make_batch, make_data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import Module
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


def _model() -> Module:
    model: Module = GraphSAGE(WIDTH, 8, 2, CLASSES).double()
    return model


def wrap_in_ddp(mesh: Mesh) -> dict[str, str]:
    """What is said about DDP and FSDP around a wrapped model and inside, and about a batch of another mesh."""
    loader = NeighborLoader(make_data(), [3, 3], torch.arange(20), batch_size=20, mesh=mesh)
    batch = loader.make_batch(0, 0)
    wrapped = parallelize(_model(), mesh)
    outside: Any = DistributedDataParallel(wrapped)
    inside: Any = DistributedDataParallel(_model())
    warnings.simplefilter("ignore")  # about FSDP on CPUs
    devices = init_device_mesh("cpu", (mesh.size,))
    on_cpu = torch.device("cpu")
    flat: Any = FullyShardedDataParallel(parallelize(_model(), mesh), device_id=on_cpu, use_orig_params=True)
    sharded: Any = parallelize(_model(), mesh)
    fully_shard(sharded.convs[0], mesh=devices)
    shard_inside: Any = fully_shard(_model(), mesh=devices)
    alone = make_batch(2, mesh=solo_mesh())
    return {
        "outside": _message(lambda: outside(batch.x, batch.edge_index)),
        "inside": _message(lambda: parallelize(inside, mesh)),
        "FSDP": _message(lambda: flat(batch.x, batch.edge_index)),
        "a part in fully_shard": _message(lambda: sharded(batch.x, batch.edge_index)),
        "inside FSDP": _message(lambda: parallelize(FullyShardedDataParallel(_model(), device_id=on_cpu), mesh)),
        "inside fully_shard": _message(lambda: parallelize(shard_inside, mesh)),
        "other mesh": _message(lambda: wrapped(alone.x, alone.edge_index)),
        "alone": _message(lambda: parallelize(wrapped, solo_mesh())(batch.x, batch.edge_index)),
    }
