"""A step leaves no reference cycle behind that holds a mini-batch or its tensors.

The garbage collector of Python would find it, but a full collection is rare in a process with many objects, and what
waits for it is whole mini-batches.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from link_programs import NEGATIVES, LinkCase, link_loader, loss_of
from small_graph import CLASSES, WIDTH, Case, make_model, small_store
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GraphSAGE
from typed_models import FANOUTS, make_store, run_model
from typed_models import make_model as make_typed_model

from gsplit import NeighborLoader, Trainer, infer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.nn.forward_pass import ForwardPass


@contextmanager
def _only_reference_counts() -> Iterator[list[Any]]:
    """Without the garbage collector; afterwards the list has what it would have had to collect."""
    gc.collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _train(model: Module, loader: Any, loss_of_batch: Callable[[Any], Tensor]) -> None:
    for batch in loader:
        loss_of_batch(batch).backward()
        model.zero_grad()


def _assert_nothing_is_left(run: Callable[[], None]) -> None:
    run()  # caches, and what is made once
    with _only_reference_counts() as found:
        run()
    kept = [thing for thing in found if isinstance(thing, Tensor | ForwardPass) or "Batch" in type(thing).__name__]
    assert not Counter(type(thing).__name__ for thing in kept)


@pytest.mark.parametrize("name", ["sage", "gat", "gcn", "gin"])
def test_of_a_model(name: str) -> None:
    model = parallelize(make_model(Case(name, "split", "random", 0.5, None, None)), solo_mesh())
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3, 3], "train", batch_size=12)

    def loss_of_batch(batch: Any) -> Tensor:
        out = model(batch.x, batch.edge_index)
        loss: Tensor = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
        return loss

    _assert_nothing_is_left(lambda: _train(model, loader, loss_of_batch))


def test_of_a_heterogeneous_model() -> None:
    model = parallelize(make_typed_model("sage"), solo_mesh(), graph=make_store(2))
    loader = NeighborLoader(make_store(4), FANOUTS, ("paper", "train"), batch_size=30)

    def loss_of_batch(batch: Any) -> Tensor:
        loss: Tensor = batch.mean(F.cross_entropy(run_model(model, batch), batch.y, reduction="none"))
        return loss

    _assert_nothing_is_left(lambda: _train(model, loader, loss_of_batch))


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_of_link_prediction(negatives: str) -> None:
    model = parallelize(GraphSAGE(5, 8, 2, 6, dropout=0.3).double(), solo_mesh())
    loader = link_loader(solo_mesh(), LinkCase(negatives=negatives))

    def loss_of_batch(batch: Any) -> Tensor:
        loss: Tensor = batch.mean(loss_of(model(batch.x, batch.edge_index), batch))
        return loss

    _assert_nothing_is_left(lambda: _train(model, loader, loss_of_batch))


def test_of_the_trainer_and_its_evaluation() -> None:
    store = small_store("random", 1)[0]
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5).double(), solo_mesh())
    loader = NeighborLoader(store, [3, 3], "train", batch_size=12)
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loader)

    def run() -> None:
        trainer.train_epoch()
        infer(model, store)

    _assert_nothing_is_left(run)


def test_of_a_forward_that_fails() -> None:
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), solo_mesh())
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12)

    def run() -> None:
        for batch in loader:
            with pytest.raises(InputError):
                model(batch.x[:1], batch.edge_index)

    _assert_nothing_is_left(run)
