"""Ranks that share a batch without sharing gradients are refused: DDP and FSDP, and another mesh."""

import re
import warnings
from typing import Any

import pytest
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
from gsplit_bench.ranks import run_ranks


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


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_ranks(wrap_in_ddp, 2)


@pytest.mark.parametrize(
    "case, message",
    [
        (
            "outside",
            r"the wrapped model: expected no other wrapper \(got DistributedDataParallel\).*averages gradients",
        ),
        ("inside", r"the model: expected a model that is not parallel yet \(got DistributedDataParallel\)"),
        ("FSDP", r"the wrapped model: expected no other wrapper \(got FSDP\).*averages gradients itself"),
        ("a part in fully_shard", r"the wrapped model: expected no other wrapper \(got FSDP\)"),
        ("inside FSDP", r"the model: expected a model that is not parallel yet \(got FullyShardedDataParallel\)"),
        ("inside fully_shard", r"the model: expected a model that is not parallel yet \(got FSDPModule\)"),
        ("other mesh", r"expected a batch of the model's mesh of 2 ranks \(got one of another mesh, of 1\).*same mesh"),
        ("alone", r"expected a batch of the model's mesh of 1 ranks \(got one of another mesh, of 2\)"),
    ],
)
def test_gradients_over_other_ranks_are_refused(messages: list[dict[str, str]], case: str, message: str) -> None:
    for of_rank in messages:
        assert re.search(message, of_rank[case]), of_rank[case]
