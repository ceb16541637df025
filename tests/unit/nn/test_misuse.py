"""What goes wrong with a wrapped model after wrapping is named, and does not spoil it."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, Stack, make_batch, make_loader, sage, two_layers
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh


def test_misuse_after_wrapping_is_named() -> None:
    model: Any = parallelize(sage().double(), solo_mesh())
    shallow, deep = make_batch(2), make_batch(3)
    with pytest.raises(InputError, match=r"num_neighbors: expected 3 numbers, one per layer of the model .got 2"):
        model(shallow.x, shallow.edge_index)
    with pytest.raises(InputError, match="a layer: expected a call from within the wrapped model's forward"):
        model.convs[0](deep.x, deep.edge_index)
    assert model(deep.x, deep.edge_index).shape == (20, CLASSES)  # and it still works
    with pytest.raises(RuntimeError):
        model(deep.x[:, :2], deep.edge_index)
    assert model(deep.x, deep.edge_index).shape == (20, CLASSES)


def test_the_edges_of_another_batch_are_refused() -> None:
    kept: list[Any] = []

    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        h = self.a(x, edge_index)
        return self.b(h, kept[0] if kept else edge_index)  # type: ignore[no-any-return]

    model = parallelize(Stack(forward, **two_layers()), solo_mesh())
    loader = make_loader(2)
    batch, other = loader.make_batch(0, 0), loader.make_batch(1, 0)
    want = model(batch.x, batch.edge_index)
    kept.append(other.edge_index)
    with pytest.raises(InputError, match=r"from within the wrapped model's forward .got the edges of another batch"):
        model(batch.x, batch.edge_index)
    kept[0] = batch.edge_index  # any handle of the same batch will do
    assert model(batch.x, batch.edge_index).equal(want)


def test_checkpointed_layers_are_refused_rather_than_wrong() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        h = self.a(x, edge_index)
        return checkpoint(self.b, h, edge_index, use_reentrant=False)  # type: ignore[no-any-return]

    model = parallelize(Stack(forward, **two_layers()), solo_mesh())
    batch = make_batch(2)
    with pytest.raises(InputError, match="activation checkpointing of layers is not supported"):
        batch.sum(model(batch.x, batch.edge_index).sum(1)).backward()


def test_a_checkpointed_model_is_refused_rather_than_wrong() -> None:
    model = parallelize(sage().double(), solo_mesh())
    batch = make_batch(3)
    out: Any = checkpoint(lambda x: model(x, batch.edge_index), batch.x, use_reentrant=False)
    with pytest.raises(InputError, match="the model: expected a forward outside of backward"):
        batch.sum(out.sum(1)).backward()


def test_a_layer_that_comes_late_is_refused() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        layer = self.b if getattr(self, "late", False) else self.a
        return layer(x, edge_index)  # type: ignore[no-any-return]

    model: Any = parallelize(Stack(forward, **two_layers()), solo_mesh())
    model.late = True
    batch = make_batch(1)
    with pytest.raises(InputError, match="b: expected the same layers in every forward"):
        model(batch.x, batch.edge_index)


def test_a_forward_that_drops_now_and_then_is_refused() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        h = self.a(x, edge_index)
        return F.dropout(h, 0.5) if self.calls > 50 else h

    model = parallelize(Stack(forward, **two_layers()), solo_mesh())
    batch = make_batch(1)
    model.calls = 99  # type: ignore[assignment]
    with pytest.raises(InputError, match="dropout: expected the same calls in every forward"):
        model(batch.x, batch.edge_index)


class _Counting(TorchFunctionMode):
    """A mode of the user."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def _interruptible(teacher: Any = None) -> Any:
    """A wrapped model with dropout that a user interrupts while ``interrupt`` is set; it may call another one."""

    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        if self.teachers:
            with torch.no_grad():
                self.teachers[0](x, edge_index)
        h = F.dropout(self.a(x, edge_index), 0.5, self.training)
        if self.interrupt:
            raise KeyboardInterrupt
        return F.dropout(self.b(h, edge_index), 0.5, self.training)

    model: Any = Stack(forward, **two_layers())
    model.interrupt, model.teachers = False, []
    parallelize(model, solo_mesh(), verify_every=0)
    model.teachers = [teacher] * (teacher is not None)  # a list: not a part of the model
    return model


def _interrupt(model: Any, batch: Any) -> None:
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(batch.x, batch.edge_index)
    model.interrupt = False


def test_an_interrupted_forward_leaves_torch_as_it_was() -> None:
    model, batch = _interruptible(), make_batch(2)
    want = model(batch.x, batch.edge_index)
    _interrupt(model, batch)
    assert torch.rand(3).shape == (3,)  # as in the next cell of a notebook
    torch.manual_seed(0)
    drawn = F.dropout(torch.ones(100))
    torch.manual_seed(0)
    assert drawn.equal(torch.nn.Dropout()(torch.ones(100)))
    assert model(batch.x, batch.edge_index).equal(want)
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    _interrupt(model, batch)
    held = ref(model), ref(batch)
    del model, batch
    _interruptible()  # the cell that makes the model, again
    gc.collect()
    assert [found() for found in held] == [None, None]


def test_an_interrupted_forward_leaves_modes_of_others() -> None:
    teacher = _interruptible()
    student, batch = _interruptible(teacher), make_batch(2)
    want = student(batch.x, batch.edge_index)
    _interrupt(teacher, batch)
    assert student(batch.x, batch.edge_index).equal(want)
    teacher.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        student(batch.x, batch.edge_index)
    teacher.interrupt = False
    assert student(batch.x, batch.edge_index).equal(want)
    _interrupt(student, batch)
    with _Counting() as mode:
        assert student(batch.x, batch.edge_index).equal(want)
        before = mode.calls
        torch.ones(2) + 1
        assert mode.calls > before
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]


def test_the_forward_after_an_interrupted_one_may_run_in_another_thread() -> None:
    model, batch = _interruptible(), make_batch(2)
    want = model(batch.x, batch.edge_index)
    _interrupt(model, batch)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(model, batch.x, batch.edge_index).result(60).equal(want)
    assert model(batch.x, batch.edge_index).equal(want) and not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
