"""What ranks run in the tests of batches that are made ahead."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.minibatch.batch import Batch

Trained = tuple[list[float], list[list[float]], list[list[float]]]


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
    return sum(thread.name.startswith("gsplit-loader") for thread in threading.enumerate())


def read_batch(batch: Batch) -> list[float]:
    """Every number of a batch: rows, labels, ids and edges."""
    found = [batch.x, batch.y, batch.n_id]
    found += [part for block in batch.blocks for part in (block.indptr, block.src_rows)]
    return [float(value) for tensor in found for value in tensor.reshape(-1)]


@contextmanager
def _failing_at(loader: gsplit.NeighborLoader, step: int) -> Iterator[None]:
    """Every rank fails in this step, before its first exchange."""
    sample = loader._sample

    def fail(strategy: Any, key: Any, telemetry: Any) -> Any:
        if key.step == step:
            raise OSError(f"step {key.step} cannot be read")
        return sample(strategy, key, telemetry)

    with patch.object(loader, "_sample", fail):
        yield


def fail_and_go_on(loader: gsplit.NeighborLoader) -> list[list[float]]:
    """An epoch that fails in a step in the middle, one that is left early, and the numbers of one that is not."""
    middle = len(loader) // 2
    seen: list[int] = []
    with _failing_at(loader, middle), pytest.raises(OSError, match=f"step {middle} cannot be read"):
        seen.extend(batch.key.step for batch in loader)
    assert seen == list(range(middle)) and num_loader_threads() == 0
    for batch in loader:
        if batch.key.step == 1:
            break
    loader.set_epoch(9)
    batches = [read_batch(batch) for batch in loader]
    assert num_loader_threads() == 0
    return batches


def train_in_pieces(mesh: Mesh, strategy: str, prefetch: int, sampling_threads: int = 1) -> Trained:
    """Two epochs, the first one left twice, with an evaluation and a batch by name while others are under way."""
    trainer = make_trainer(mesh, strategy, prefetch=prefetch, sampling_threads=sampling_threads)
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
    assert isinstance(loader, gsplit.NeighborLoader)
    return trainer.state.history.losses.tolist(), weights, fail_and_go_on(loader)


def train_at_depths(mesh: Mesh, depths: list[tuple[str, int, int]]) -> list[Trained]:
    """The same training with several strategies, depths and numbers of threads, one after the other."""
    return [train_in_pieces(mesh, *depth) for depth in depths]
