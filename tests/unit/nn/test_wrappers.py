"""torch.compile before and after wrapping is refused by name where it cannot work, and left alone where it can.

Real DDP is in tests/dist/test_ddp.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_models import CLASSES, WIDTH, make_batch
from torch.nn import Linear, Module
from torch_geometric.nn import SAGEConv

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.minibatch.batch import Batch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # dynamo's own


class Model(Module):
    """Layers, and a row-wise part between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mlp, self.b = SAGEConv(WIDTH, 8), torch.nn.Sequential(Linear(8, 8)), SAGEConv(8, CLASSES)
        self.double()

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.b(self.mlp(self.a(x, edge_index)), edge_index)


def _compile(model: Module) -> Module:
    compiled: Any = torch.compile(model, backend="eager")
    assert isinstance(compiled, Module)
    return compiled


def _compile_in_place(model: Module) -> Module:
    model.compile(backend="eager")
    return model


COMPILERS = [_compile, _compile_in_place]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compile_module", COMPILERS)
def test_a_compiled_model_is_refused_when_wrapping(compile_module: Callable[[Module], Module]) -> None:
    message = r"the model: expected message-passing layers that are not compiled .*compile row-wise submodules only"
    with pytest.raises(InputError, match=message):
        parallelize(compile_module(Model()), solo_mesh(), num_features=WIDTH)


def test_a_compiled_layer_is_refused_when_wrapping() -> None:
    model = Model()
    model.a.compile(backend="eager")
    with pytest.raises(InputError, match="a: expected message-passing layers that are not compiled"):
        parallelize(model, solo_mesh())


def _call(model: Module, batch: Batch) -> Any:
    return model(batch.x, batch.edge_index)


@pytest.mark.parametrize("compile_module", COMPILERS)
def test_compiling_a_wrapped_model_is_refused_when_it_is_called(compile_module: Callable[[Module], Module]) -> None:
    wrapped, batch = parallelize(Model(), solo_mesh()), make_batch(2)
    want = _call(wrapped, batch)
    with pytest.raises(InputError, match="the wrapped model: expected a call that is not compiled .got torch.compile"):
        _call(compile_module(wrapped), batch)
    if compile_module is _compile:
        assert torch.equal(_call(wrapped, batch), want)  # the wrapped model itself still works


def test_a_compiled_training_step_is_refused() -> None:
    wrapped, batch = parallelize(Model(), solo_mesh()), make_batch(2)
    step = torch.compile(lambda: _call(wrapped, batch).sum(), backend="eager")
    with pytest.raises(InputError, match="a call that is not compiled"):
        step()


def test_compiled_row_wise_modules_and_losses_work() -> None:
    batch, plain = make_batch(2), parallelize(Model(), solo_mesh())
    model = Model()
    model.mlp = _compile(model.mlp)  # type: ignore[assignment]
    wrapped = parallelize(model, solo_mesh())
    loss = torch.compile(lambda out: out.square().sum(), backend="eager")
    assert torch.equal(loss(_call(wrapped, batch)), _call(plain, batch).square().sum())


def test_a_data_parallel_model_is_refused_when_wrapping() -> None:
    with pytest.raises(InputError, match=r"the model: expected a model that is not parallel yet .got DataParallel"):
        parallelize(torch.nn.DataParallel(Model()), solo_mesh())
