"""Layers get a forward of their own: user hooks, copies, pickles and plain calls behave as without it."""

import copy
import inspect
import io
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from nn_models import WIDTH, Stack, make_batch, make_data, single, two_layers
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GATConv, GCNConv, PNAConv, SAGEConv

import gsplit
from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.minibatch.edge_handles import EdgeHandle
from gsplit.nn.runtime import remove_runtime
from gsplit.nn.split_forward import SplitForward

LAYERS: dict[str, Callable[[], Module]] = {
    "sage": lambda: SAGEConv(WIDTH, 4),
    "gcn": lambda: GCNConv(WIDTH, 4),
    "gat": lambda: GATConv(WIDTH, 4),
    "pna": lambda: PNAConv(WIDTH, 4, ["mean"], ["identity"], torch.ones(3)),
}


def _model(name: str = "sage") -> Any:
    torch.manual_seed(0)
    return single(LAYERS[name]().double())


def _two() -> Any:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        return self.b(self.a(x, edge_index), edge_index)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Stack(forward, **two_layers())


def _call(model: Module, batch: Any) -> Tensor:
    out: Tensor = model(batch.x, batch.edge_index)
    return out


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_user_hooks_run_once_with_the_models_arguments_and_the_destinations(name: str, when: str) -> None:
    model, batch = _model(name), make_batch(1)
    seen: list[Any] = []

    def hook() -> None:
        model.layer.register_forward_pre_hook(lambda module, args: seen.append(("pre", *args)))
        model.layer.register_forward_hook(lambda module, args, out: seen.append(("post", out)))

    if when == "before wrapping":
        hook()
    parallelize(model, solo_mesh())
    if when == "after wrapping":
        hook()
    seen.clear()
    out = _call(model, batch)
    assert [entry[0] for entry in seen] == ["pre", "post"]
    assert seen[0][1] is batch.x and isinstance(seen[0][2], EdgeHandle)
    assert seen[1][1] is out and out.size(0) == batch.num_targets


@pytest.mark.parametrize("name", LAYERS)
def test_a_hook_can_change_what_goes_in_and_what_comes_out(name: str) -> None:
    model, plain, batch, data = parallelize(_model(name), solo_mesh()), _model(name), make_batch(1), make_data()
    for each in (model, plain):
        each.layer.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
        each.layer.register_forward_hook(lambda module, args, out: out + 1)
    want = plain(data.x, data.edge_index)
    assert torch.allclose(_call(model, batch), want[batch.n_id[: batch.batch_size]], atol=1e-12)
    assert torch.allclose(torch.as_tensor(gsplit.infer(model, data)), want, atol=1e-12)  # once, not in every replay


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_backward_hook_runs_once() -> None:
    model, batch = parallelize(_model("gat"), solo_mesh()), make_batch(1)
    gradients: list[Tensor] = []
    model.layer.register_full_backward_hook(lambda module, inputs, outputs: gradients.append(outputs[0]))
    batch.sum(_call(model, batch).sum(1)).backward()
    assert len(gradients) == 1 and gradients[0].shape == (20, 4)


@pytest.mark.parametrize("name", LAYERS)
def test_a_deep_copy_runs_its_own_layers(name: str) -> None:
    model, batch = parallelize(_model(name), solo_mesh()), make_batch(1)
    want = _call(model, batch)
    copied = copy.deepcopy(model)
    assert copied.layer.forward.layer is copied.layer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.layer.register_forward_hook(lambda *_: pytest.fail("the original was called"))
    assert torch.equal(_call(copied, batch), want)
    data = make_data()
    assert torch.equal(copied.layer(data.x, data.edge_index), copied(data.x, data.edge_index))


def test_a_copied_layer_asks_for_its_model() -> None:
    model, batch, data = parallelize(_two(), solo_mesh()), make_batch(2), make_data()
    layer = copy.deepcopy(model.a)
    assert torch.equal(layer(data.x, data.edge_index), model.a(data.x, data.edge_index))
    with pytest.raises(InputError, match="a layer: expected a call from within the wrapped model's forward"):
        layer(batch.x, batch.edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_a_pickled_layer_runs_the_stock_forward(name: str) -> None:
    model, data = parallelize(_model(name), solo_mesh()), make_data()
    file = io.BytesIO()
    torch.save(model.layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.forward.layer is loaded
    assert torch.equal(loaded(data.x, data.edge_index), _model(name).layer(data.x, data.edge_index))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    _model(name).load_state_dict(torch.load(file, weights_only=True))


def _thrice(self: Any, x: Tensor, edge_index: Any) -> Tensor:
    return 3 * SAGEConv.forward(self, x, edge_index)  # type: ignore[no-any-return]


def test_a_forward_that_the_user_put_on_a_layer_stays() -> None:
    model, plain, batch, data = _model(), _model(), make_batch(1), make_data()
    own = model.layer.forward = MethodType(_thrice, model.layer)
    parallelize(model, solo_mesh())
    want = 3 * plain(data.x, data.edge_index)
    assert torch.allclose(model(data.x, data.edge_index), want, atol=1e-12)
    assert torch.allclose(_call(model, batch), want[batch.n_id[: batch.batch_size]], atol=1e-12)
    copied = copy.deepcopy(model)
    assert copied.layer.forward.patched.__self__ is copied.layer
    parallelize(model, solo_mesh())  # not once more around the first
    assert model.layer.forward.patched is own
    remove_runtime(model)
    assert model.layer.forward is own


def test_a_forward_that_is_wrapped_later_runs_once() -> None:
    model, batch, data = parallelize(_model(), solo_mesh()), make_batch(1), make_data()
    want = 2 * _call(model, batch)
    ours = model.layer.forward
    model.layer.forward = lambda *args: 2 * ours(*args)
    assert torch.allclose(_call(model, batch), want, atol=1e-12)
    found = torch.as_tensor(gsplit.infer(model, data))
    assert torch.allclose(found[batch.n_id[: batch.batch_size]], want, atol=1e-12)


def test_unwrapping_leaves_nothing_behind() -> None:
    model = _model("gcn")
    before = inspect.signature(model.layer.forward)
    parallelize(model, solo_mesh())
    assert isinstance(model.layer.forward, SplitForward)
    assert inspect.signature(model.layer.forward) == before
    remove_runtime(model)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_options_of_a_layer_are_as_before_after_a_forward_that_fails(name: str) -> None:
    model, batch = parallelize(_model(name), solo_mesh()), make_batch(1)
    options = {key: value for key, value in vars(model.layer).items() if isinstance(value, bool)}
    with pytest.raises(RuntimeError):
        model(batch.x[:, :2], batch.edge_index)
    _call(model, batch)
    assert {key: value for key, value in vars(model.layer).items() if isinstance(value, bool)} == options


def test_inference_runs_each_layer_once_per_chunk_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = parallelize(_two(), solo_mesh()), make_data()
    rows: list[int] = []
    stock = SAGEConv.forward

    def counted(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(x[1].size(0))
        return stock(self, x, *args, **kwargs)

    monkeypatch.setattr(SAGEConv, "forward", counted)
    gsplit.infer(model, data)
    assert rows == [data.num_nodes] * 2
