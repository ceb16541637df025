"""A step of the optimizer: no gradient that is not its own, targets without labels, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_graph import CLASSES, WIDTH, small_store
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, NeighborLoader, Trainer, losses, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.in_memory import MemoryStore


def _loader(y: Any = None, batch_size: int = 12) -> NeighborLoader:
    store, _ = small_store("random", 1)
    if y is not None:
        arrays, dtypes = store.arrays | {"y": y}, store.dtypes | {"y": y.dtype.name}
        store = MemoryStore(store.graph, store.part_boundaries, arrays, dtypes)
    return NeighborLoader(store, [-1, -1], "train", batch_size=batch_size)


def _model(outputs: int = CLASSES) -> GraphSAGE:
    torch.manual_seed(0)
    return parallelize(GraphSAGE(WIDTH, 8, 2, outputs).double(), solo_mesh())


def _trainer(parameters: Callable[[GraphSAGE], Any] = GraphSAGE.parameters, **options: Any) -> Trainer:
    model = _model()
    return Trainer(model, torch.optim.SGD(parameters(model), lr=0.5), _loader(), **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_failed_leaves_nothing_to_those_after_it(accumulate: int, tmp_path: Path) -> None:
    calls = 0

    def fails_once(out: Tensor, y: Tensor) -> losses.TargetLoss:
        nonlocal calls
        calls += 1
        if calls == 4:  # some gradients are there already, as an error in the middle of the backward pass leaves them
            for parameter in trainer.state.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise RuntimeError("out of memory")
        return losses.cross_entropy(out, y)

    whole = _trainer(accumulate=accumulate).train_epoch()
    trainer = _trainer(loss_fn=fails_once, accumulate=accumulate, save_to=tmp_path, save_every=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train_epoch()
    trainer.load(tmp_path)
    trainer.train_epoch()
    assert trainer.state.history.losses.tolist() == whole


def test_gradients_that_others_left_are_none_of_a_step() -> None:
    trainer = _trainer()
    batch = trainer.state.loader.make_batch(0, 0)
    model = trainer.state.model
    batch.mean(*losses.cross_entropy(model(batch.x, batch.edge_index), batch.y)).backward()
    assert trainer.train_epoch() == _trainer().train_epoch()


def test_parameters_that_are_not_trained_do_not_count_in_the_norm(tmp_path: Path) -> None:
    """Their gradients would grow from step to step, and be gone after resuming."""

    def make() -> Trainer:
        return _trainer(lambda model: model.convs[1].parameters(), max_grad_norm=0.05, save_to=tmp_path)

    whole, begun, resumed = make(), make(), make()
    losses_of_all = whole.train_epoch()
    assert all(parameter.grad is None for parameter in whole.state.model.parameters())
    first = begun.train_epoch(2)
    begun.save()
    resumed.load(tmp_path)
    assert first + resumed.train_epoch() == losses_of_all
    frozen = _trainer(
        lambda model: model.convs[0].requires_grad_(False) and model.convs[1].parameters(), max_grad_norm=0.05
    )
    np.testing.assert_allclose(frozen.train_epoch(), losses_of_all, rtol=1e-12)


def test_a_parameter_of_the_loss_is_trained_alike_by_accumulation() -> None:
    def train(batch_size: int, accumulate: int) -> float:
        model, scale = _model(), torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
        loader = _loader(batch_size=batch_size)
        loss = lambda out, y: F.cross_entropy(out * scale, y, reduction="none")  # noqa: E731
        Trainer(model, optimizer, loader, loss_fn=loss, accumulate=accumulate).train_epoch()
        return float(scale.detach())

    assert train(12, 5) == pytest.approx(train(60, 1), abs=1e-14)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("missing", [-1, -100])
def test_classes_below_zero_are_no_labels(missing: int, weighted: bool) -> None:
    torch.manual_seed(0)
    out, y = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, missing, 2, 1, missing, 1])
    each = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    values, weight = (losses.weighted_cross_entropy(each) if weighted else losses.cross_entropy)(out, y)
    assert weight is not None
    found = (values * weight).sum() / weight.sum()
    want = F.cross_entropy(out, y, weight=each if weighted else None, ignore_index=missing)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-15)
    (gradient,) = torch.autograd.grad(found, out)
    assert gradient.isfinite().all() and (gradient[y < 0] == 0).all()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mini_batch_without_labels_changes_nothing(accumulate: int) -> None:
    y = np.random.default_rng(0).normal(size=(90, 2))
    batch = _loader(y).make_batch(0, 1)
    y[batch.input_ids[: batch.num_targets].numpy()] = np.nan
    model = _model(2)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), _loader(y), loss_fn="mse", accumulate=accumulate
    )
    found = trainer.train_epoch()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert [loss == 0 for loss in found] == ([False, True, False, False, False] if accumulate == 1 else [False] * 3)
    empty = _loader(y).make_batch(0, 1)
    values = torch.ones(empty.num_targets, dtype=torch.float16, requires_grad=True)
    mean = empty.mean(values, torch.zeros(empty.num_targets))
    mean.backward()
    assert mean == 0 and mean.dtype == torch.float32 and values.grad is not None and (values.grad == 0).all()


def test_a_loss_may_return_a_plain_pair() -> None:
    pair = lambda out, y: (F.cross_entropy(out, y, reduction="none"), torch.ones(len(y)))  # noqa: E731
    assert _trainer(loss_fn=pair).train_epoch() == _trainer().train_epoch()


def test_what_cannot_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="max_grad_norm: expected a positive number .got nan"):
        _trainer(max_grad_norm=float("nan"))
    with pytest.raises(InputError, match="precision: expected a model in float32 for bf16 .got float64"):
        _trainer(precision="bf16")
    loader, model = _loader(), _model()
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))])
    monkeypatch.setattr(loader.mesh.world, "size", 2)
    with pytest.raises(InputError, match="the optimizer: expected parameters of the model .got 1 others"):
        Trainer(model, optimizer, loader)
