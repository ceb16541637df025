"""What ranks run in the tests of input rows that are read in place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from recorded_calls import record_calls
from torch import Tensor
from torch_geometric.nn import SAGEConv

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.features.in_place import InPlaceRows

HIDDEN = 8


@dataclass(frozen=True)
class Case:
    """A loader and a model. ``first``: what the model does with ``batch.x`` before its first layer.

    ``prints_on``, ``caches_on``: the rank that prints ``batch.x``, and the rank with a cache.
    """

    strategy: str = "split"
    first: str = ""
    prefetch: int = 0
    targets: tuple[int, ...] | None = None
    prints_on: int | None = None
    caches_on: int | None = None


class Net(torch.nn.Module):
    """Two SAGE layers, perhaps behind an encoder or a dropout."""

    def __init__(self, width: int, num_classes: int, first: str) -> None:
        super().__init__()
        self.first = first
        self.encoder = torch.nn.Linear(width, width)
        self.convs = torch.nn.ModuleList([SAGEConv(width, HIDDEN), SAGEConv(HIDDEN, num_classes)])

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if self.first == "encoder":
            x = self.encoder(x).relu()
        if self.first == "dropout":
            x = F.dropout(x, 0.4, self.training)
        out: Tensor = self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)
        return out


@dataclass(frozen=True)
class Step:
    """What a step has computed and counted; ``loaded``: before the model was called.

    ``exchanged``: the collectives of input rows.
    """

    loss: float
    gradients: list[float]
    num_mixed: int
    exchanged: list[str]
    loaded: dict[str, int]
    counts: dict[str, int]

    @property
    def result(self) -> tuple[float, list[float]]:
        return self.loss, self.gradients


def train_steps(mesh: Mesh, paths: list[str], cases: list[Case]) -> list[list[Step]]:
    """Per case: the steps of an epoch, without an optimizer; on this rank's own file if there are several."""
    graph = gsplit.open(paths[mesh.rank % len(paths)])
    return [_train(mesh, graph, case) for case in cases]


def _train(mesh: Mesh, graph: Any, case: Case) -> list[Step]:
    nodes = "train" if case.targets is None else torch.tensor(case.targets)
    loader = gsplit.NeighborLoader(
        graph,
        [3, 3],
        nodes,
        batch_size=40,
        mesh=mesh,
        seed=2,
        strategy=case.strategy,
        prefetch=case.prefetch,
        cache="1MB" if case.caches_on == mesh.rank else 0,
    )
    calls = record_calls(loader._makers[0].step_loader._comm)
    torch.manual_seed(0)
    model = gsplit.parallelize(Net(graph.num_features, graph.num_classes, case.first), mesh)
    steps = []
    for batch in loader:
        loaded = dict(batch.telemetry.counts)
        assert isinstance(batch.x, InPlaceRows) == ("rows_in_place" in loaded)
        if case.prints_on == mesh.rank:
            assert "tensor" in str(batch.x)
        for parameter in model.parameters():
            parameter.grad = None
        x = batch.cast(torch.float32).x
        loss = batch.mean(F.cross_entropy(model(x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = torch.cat([grad.view(-1) for grad in found]).tolist()
        exchanged = [str(call) for call in calls if call.name == "exchange features"]
        counts = dict(batch.telemetry.counts)
        steps.append(Step(float(loss.detach()), gradients, len(batch.x), exchanged, loaded, counts))
        calls.clear()
    return steps


def infer_rows(mesh: Mesh, path: str, first: str) -> tuple[list[Any], int]:
    """The outputs of a model for all vertices, and the number of exchanges of rows."""
    graph = gsplit.open(path)
    calls = record_calls(mesh.loading_groups.inputs)
    torch.manual_seed(0)
    model = gsplit.parallelize(Net(graph.num_features, graph.num_classes, first), mesh)
    out = Path(path).with_name(f"{first}-{mesh.size}-{mesh.replica_shares_host}.npy")
    rows = gsplit.infer(model, graph, out).tolist()
    return rows, len([call for call in calls if call.name == "exchange features"])
