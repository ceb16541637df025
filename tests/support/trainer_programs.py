"""What ranks run in the tests of the trainer."""

from collections.abc import Callable

import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.device.devices import AsyncHostCopy
from gsplit.distributed.comm.mesh import Mesh
from gsplit.training.callbacks import Callback, StepReport


class EachStep(Callback):
    """Calls a function with the report of every step."""

    def __init__(self, act: Callable[[StepReport], object]) -> None:
        self._act = act

    def on_step(self, report: StepReport) -> None:
        self._act(report)


def _trainer(mesh: Mesh) -> gsplit.Trainer:
    store, ownership = small_store("random", 2)
    own = ownership if mesh.size > 1 else None
    loader = gsplit.NeighborLoader(store, [3, 3], "train", batch_size=12, mesh=mesh, ownership=own)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5).double(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return gsplit.Trainer(model, optimizer, loader, lr_scheduler=scheduler)


def train_and_resume(mesh: Mesh) -> tuple[list[float], list[float], int, int]:
    """An epoch in one go, and in two halves with fresh objects for the second; losses and edges of both."""
    whole, begun, resumed = _trainer(mesh), _trainer(mesh), _trainer(mesh)
    whole.train_epoch()
    begun.train_epoch(2)
    resumed.state.load_state_dict(begun.state.state_dict())
    resumed.train_epoch()
    edges = whole.state.train_edges, resumed.state.train_edges
    return whole.state.history.losses.tolist(), resumed.state.history.losses.tolist(), *edges


def device_fails(mesh: Mesh) -> tuple[str, int]:
    """The error that ends training on a device after which no loss can be read any more, and the steps done."""
    store, _ = small_store("random", 1)
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), mesh)
    loader = gsplit.NeighborLoader(store, [3, 3], "train", batch_size=6, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:

        def fail(report: StepReport) -> None:
            patch.setattr(AsyncHostCopy, "__float__", lambda _: 1 / 0)
            raise RuntimeError("the first error")

        trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters()), loader, callbacks=[EachStep(fail)])
        try:
            trainer.train_epoch()
        except Exception as error:
            return str(error), trainer.state.num_steps
    return "no error", trainer.state.num_steps
