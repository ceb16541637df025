"""What goes wrong with a wrapped model after wrapping is named, and does not spoil it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, Stack, make_batch, make_loader, sage, two_layers
from torch import Tensor
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


def test_an_interrupted_forward_leaves_torch_as_it_was() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        h = F.dropout(self.a(x, edge_index), 0.5, self.training)
        if getattr(self, "interrupt", False):
            raise KeyboardInterrupt
        return self.b(h, edge_index)  # type: ignore[no-any-return]

    model: Any = parallelize(Stack(forward, **two_layers()), solo_mesh())
    batch = make_batch(2)
    want = model(batch.x, batch.edge_index)
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(batch.x, batch.edge_index)
    assert torch.rand(3).shape == (3,)  # as in the next cell of a notebook
    torch.manual_seed(0)
    drawn = F.dropout(torch.ones(100))
    torch.manual_seed(0)
    assert drawn.equal(torch.nn.Dropout()(torch.ones(100)))
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    other.register_forward_hook(lambda *_: print(torch.rand(1)))  # so its frame is like that of the model
    assert other(torch.ones(2, 4)).shape == (2, 4)
    model.interrupt = False
    assert model(batch.x, batch.edge_index).equal(want)
