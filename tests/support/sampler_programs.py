"""What ranks run with the built-in samplers."""

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError

__all__ = ["SAMPLERS", "STRATEGIES", "in_memory", "input_vertices", "run_all"]

SAMPLERS: list[dict[str, Any]] = [
    {"sampler": "labor"},
    {"weight_attr": "w"},
    {"sampler": "labor", "weight_attr": "w", "layer_dependency": True},
    {"replace": True},
]
STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
Checked = list[tuple[str, str, float, float]]


def in_memory() -> Data:
    """A graph with hubs, parallel edges and weights, of which some are zero."""
    generator = torch.Generator().manual_seed(3)
    n, num_edges = 300, 4000
    dst = (n * torch.rand(num_edges, generator=generator) ** 2).long()
    data = Data(
        x=torch.randn(n, 6, generator=generator),
        y=torch.randint(0, 4, (n,), generator=generator),
        edge_index=torch.stack([torch.randint(0, n, (num_edges,), generator=generator), dst]),
        train_mask=torch.rand(n, generator=generator) < 0.6,
    )
    data.w = torch.rand(num_edges, generator=generator) * (torch.rand(num_edges, generator=generator) > 0.2)
    return data


def verify_samplers(mesh: Mesh, path: str | None) -> Checked:
    """The errors of every sampler under every strategy against one process; on a store, or on a graph in memory."""
    data = in_memory()
    graph: Any = data if path is None else gsplit.open(path)
    partition = torch.arange(data.num_nodes) % 4 if path is None else None
    torch.manual_seed(0)
    model = GraphSAGE(6, 8, 3, 4, dropout=0.5)
    found = []
    for options in SAMPLERS:
        for strategy in STRATEGIES if path else STRATEGIES[:1]:
            checked = gsplit.verify(
                model,
                graph,
                [4, 3, 5],
                "train",
                batch_size=50,
                mesh=mesh,
                strategy=strategy,
                partition=partition,
                steps=2,
                **options,
            )
            found.append((str(options), strategy, checked.max_loss_error, checked.max_grad_error))
    return found


def input_vertices(mesh: Mesh, path: str) -> list[list[int]]:
    """The original ids of the input rows of a split step that this rank reads, by sampler; the uniform one first."""
    graph = gsplit.open(path)
    found = []
    for options in ({}, *SAMPLERS):
        loader = gsplit.NeighborLoader(graph, [4, 3], "train", batch_size=50, mesh=mesh, seed=1, **options)
        found.append(loader.make_batch(1, 0).n_id.tolist())
    return found


def refused_between_ranks(mesh: Mesh, path: str) -> str:
    """The message if ranks have other samplers."""
    try:
        gsplit.NeighborLoader(gsplit.open(path), [4], "train", mesh=mesh, sampler=("uniform", "labor")[mesh.rank])
    except InputError as error:
        return str(error)
    return "nothing was refused"


def run_all(mesh: Mesh, path: str) -> tuple[Checked, Checked, list[list[int]], str]:
    """All of the above, in one start of the ranks."""
    stored = verify_samplers(mesh, path)
    return stored, verify_samplers(mesh, None), input_vertices(mesh, path), refused_between_ranks(mesh, path)
