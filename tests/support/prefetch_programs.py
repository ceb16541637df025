"""What ranks run in the tests of batches that are made ahead."""

import threading
from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.exactness import CLASSES, WIDTH, small_store

Trained = tuple[list[float], list[list[float]]]


def make_trainer(mesh: Mesh, strategy: str = "split", **options: Any) -> gsplit.Trainer:
    store, ownership = small_store("no targets on rank 1", mesh.num_splits)
    loader = gsplit.NeighborLoader(
        store,
        [3, 3],
        "train",
        batch_size=8,
        mesh=mesh,
        strategy=strategy,
        ownership=ownership if mesh.num_splits > 1 else None,
        **options,
    )
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5).double(), mesh)
    return gsplit.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05), loader)


def num_loader_threads() -> int:
    """Threads that make batches ahead."""
    return sum(thread.name == "gsplit-loader" for thread in threading.enumerate())


def train_in_pieces(mesh: Mesh, strategy: str, prefetch: int) -> Trained:
    """Two epochs, the first one left twice, with an evaluation and a batch by name while others are under way."""
    trainer = make_trainer(mesh, strategy, prefetch=prefetch)
    loader, store = trainer.state.loader, small_store("no targets on rank 1", mesh.num_splits)[0]
    trainer.train_epoch(2)
    assert num_loader_threads() == 0
    batches = iter(loader)
    loader.load_state_dict(loader.state_dict())
    first = next(batches)
    same = loader.make_batch(first.key.epoch, first.key.step)  # while the thread is ahead
    assert torch.equal(first.x, same.x) and torch.equal(first.n_id, same.n_id)
    gsplit.evaluate(trainer.state.model, store, ["train"])  # exchanges over the mesh's own group, beside the thread's
    del batches
    loader.load_state_dict({"epoch": 0, "step": 2})
    trainer.train_epoch()
    trainer.train_epoch()
    assert num_loader_threads() == 0
    weights = [p.detach().reshape(-1).tolist() for p in trainer.state.model.parameters()]
    return trainer.state.history.losses, weights


def train_at_depths(mesh: Mesh, depths: list[tuple[str, int]]) -> list[Trained]:
    """The same training with several strategies and depths, one after the other."""
    return [train_in_pieces(mesh, strategy, prefetch) for strategy, prefetch in depths]
