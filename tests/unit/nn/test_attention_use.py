"""Where our attention kernels are used and where they must not be; masks of attention dropout; wrapped models."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, Stack, make_batch, make_data, make_loader, single
from torch.nn import Module
from torch_geometric.nn import GATConv, GATv2Conv, Linear, TransformerConv

import gsplit
from gsplit import parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.kernels import attention_numba
from gsplit.keys import kernels_torch
from gsplit.nn.dropout import keyed_edge_mask, keyed_mask
from gsplit.nn.forward_pass import ForwardPass
from gsplit.run.models import make_model


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of our kernels inside, by name; they are made."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("forward", "backward"):
            real: Callable[..., Any] = getattr(attention_numba, name)

            def counting(
                edges: Any, inputs: Any, *args: Any, _real: Any = real, _name: str = name, **named: Any
            ) -> Any:
                one_number = inputs.dst_terms.dim() == 2
                calls.append(f"{'gatv2' if inputs.att is not None else 'gat' if one_number else 'transformer'}.{_name}")
                return _real(edges, inputs, *args, **named)

            patch.setattr(attention_numba, name, counting)
        yield calls


def _train_step(model: Module, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    model.zero_grad()
    out = model(batch.x, batch.edge_index)
    batch.sum(out.square().sum(1)).backward()
    return out.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _without_kernels(model: Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "allows_fused", False)
        return _train_step(model, batch)


KINDS = ("gat", "gatv2", "transformer")
SIZES: dict[str, Any] = {"in_channels": WIDTH, "hidden_channels": 8, "out_channels": CLASSES, "heads": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrapped_model_is_computed_by_our_kernels(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parallelize(make_model(kind, num_layers=3, dropout=0.4, **SIZES).to(dtype), solo_mesh())
    names, batch = list(model.state_dict()), make_batch().cast(dtype)
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(model, batch)
    assert calls == [f"{kind}.forward"] * 3 + [f"{kind}.backward"] * 3
    want, wanted = _without_kernels(model, batch, monkeypatch)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    assert torch.allclose(out, want, rtol=tolerance, atol=tolerance)
    steepest = max(float(grad.abs().max()) for grad in wanted)  # that of a key's bias is 0 but for rounding
    for one, other in zip(grads, wanted, strict=True):
        assert one is not None and torch.allclose(one, other, rtol=tolerance, atol=tolerance * steepest)
    assert list(model.state_dict()) == names


class _InPlace(Module):
    def __init__(self, kind: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = kind(WIDTH, 8, heads=2, **options), kind(16, CLASSES, **options)

    def forward(self, x: torch.Tensor, edge_index: Any) -> Any:
        return self.second(F.relu(self.first(x, edge_index), inplace=True), edge_index)


@pytest.mark.parametrize(
    "kind, options",
    [(GATConv, {"bias": False}), (GATv2Conv, {"bias": False}), (TransformerConv, {"root_weight": False})],
)
def test_outputs_may_be_changed_in_place(kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(_InPlace(kind, options).double(), solo_mesh())
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(model, make_batch(2))
    assert len(calls) == 4
    want, wanted = _without_kernels(model, make_batch(2), monkeypatch)
    assert torch.allclose(out, want, atol=1e-11)
    for one, other in zip(grads, wanted, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.allclose(one, other, atol=1e-10))


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {"add_self_loops": loops}) for kind in (GATConv, GATv2Conv) for loops in (True, False)),
        (TransformerConv, {}),
    ],
)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_attention_dropout_has_the_masks_that_it_has_without_kernels(
    kind: Any, options: dict[str, bool], p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second dropout follows: the numbers of the calls must agree as well."""

    def forward(self: Any, x: Any, edge_index: Any) -> Any:
        return F.dropout(self.layer(x, edge_index), 0.5, self.training)

    layer = kind(WIDTH, 4, 3, dropout=p, **options).double()
    model, batch = parallelize(Stack(forward, layer=layer), solo_mesh()), make_batch(1)
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(model, batch)
    assert len(calls) == 2
    want, wanted = _without_kernels(model, batch, monkeypatch)
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.equal(out == 0, want == 0)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(grads, wanted, strict=True) if a is not None)
    model.eval()
    assert not torch.allclose(model(batch.x, batch.edge_index), want, atol=1e-3)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_masks_of_edges_are_the_keyed_ones(heads: int) -> None:
    indptr, places = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1 << 62, 0, 1, 7])
    dst_keys = kernels_torch.mix(11, torch.tensor([5, 9, 2]))
    rows = torch.repeat_interleave(torch.arange(3), indptr.diff())
    want = keyed_mask(kernels_torch.mix(dst_keys[rows], places), heads, 0.4)
    assert torch.equal(keyed_edge_mask(dst_keys, indptr, places, heads, 0.4), want)
    assert not keyed_edge_mask(dst_keys, indptr, places, heads, 1.0).any()


class _Own(GATConv):  # type: ignore[misc]
    def message(self, x_j: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return 2 * alpha.unsqueeze(-1) * x_j


class _OwnTransformer(TransformerConv):  # type: ignore[misc]
    def update(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs


def _with(change: Callable[[Any], Any], kind: Any = GATConv, **options: Any) -> Any:
    layer = kind(WIDTH, 4, 2, **options).double()
    change(layer)
    return layer


def _project_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.linear(x, self.weight)


def _double_projection(layer: Any) -> None:
    layer.lin.forward = MethodType(_project_twice, layer.lin)


OTHERS: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: _Own(WIDTH, 4, 2).double(),
    "mean aggregation": lambda: _with(lambda layer: None, aggr="mean"),
    "a message hook": lambda: _with(lambda layer: layer.register_message_forward_hook(lambda m, i, out: 2 * out)),
    "a forward hook": lambda: _with(lambda layer: layer.register_forward_hook(lambda m, i, out: 2 * out)),
    "a hook inside": lambda: _with(lambda layer: layer.lin.register_forward_hook(lambda m, i, out: 2 * out)),
    "a backward hook": lambda: _with(lambda layer: layer.register_full_backward_pre_hook(lambda m, g: (2 * g[0],))),
    "another projection": lambda: _with(lambda layer: setattr(layer, "lin", torch.nn.Linear(WIDTH, 8).double())),
    "a projection with a bias": lambda: _with(lambda layer: setattr(layer, "lin", Linear(WIDTH, 8).double())),
    "a patched projection": lambda: _with(_double_projection),
    "another method": lambda: _with(lambda layer: setattr(layer, "message", lambda x_j, alpha: x_j)),
    "a subclass of TransformerConv": lambda: _OwnTransformer(WIDTH, 4, 2).double(),
    "TransformerConv, mean aggregation": lambda: _with(lambda layer: None, TransformerConv, aggr="mean"),
    "TransformerConv, a message hook": lambda: _with(
        lambda layer: layer.register_message_forward_hook(lambda m, i, out: 2 * out), TransformerConv
    ),
    "TransformerConv, a forward hook": lambda: _with(
        lambda layer: layer.register_forward_hook(lambda m, i, out: 2 * out), TransformerConv
    ),
    "TransformerConv, a hook inside": lambda: _with(
        lambda layer: layer.lin_key.register_forward_hook(lambda m, i, out: 2 * out), TransformerConv
    ),
    "TransformerConv, another projection": lambda: _with(
        lambda layer: setattr(layer, "lin_value", torch.nn.Linear(WIDTH, 8).double()), TransformerConv
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_runs_as_pyg_wrote_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = single(OTHERS[name]()), make_batch(1)
    torch.manual_seed(0)
    plain, data = single(OTHERS[name]()), make_data()  # not a copy: PyG 2.6's Linear leaves hooks behind in one
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(parallelize(model, solo_mesh()), batch)
    assert calls == []
    want = plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
    want.square().sum().backward()
    assert torch.allclose(out, want, atol=1e-12)
    for grad, parameter in zip(grads, plain.parameters(), strict=True):
        assert (grad is None) == (parameter.grad is None)
        if grad is not None and parameter.grad is not None:
            assert torch.allclose(grad, parameter.grad, atol=1e-11)


@pytest.mark.parametrize("kind", [GATConv, TransformerConv])
def test_returned_attention_weights_come_from_pyg(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Any, edge_index: Any) -> Any:
        return self.layer(x, edge_index, return_attention_weights=True)[0]

    model = parallelize(Stack(forward, layer=kind(WIDTH, 4).double()), solo_mesh())
    with _counted(monkeypatch) as calls:
        _train_step(model, make_batch(1))
    assert calls == []


@pytest.mark.parametrize("kind", KINDS)
def test_edge_features_of_transformers_are_left_to_pyg(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    data.edge_attr = torch.randn(data.edge_index.size(1), 3, dtype=torch.float64)
    plain = make_model(kind, num_layers=2, edge_dim=3, **SIZES).double()
    model = parallelize(copy.deepcopy(plain), solo_mesh())
    batch = gsplit.NeighborLoader(data, [-1, -1], None, batch_size=20).make_batch(0, 0)
    with _counted(monkeypatch) as calls:
        out = model(batch.x, batch.edge_index, edge_attr=batch.edge_attr)
        batch.sum(out.sum(1)).backward()
    assert calls == ([] if kind == "transformer" else [f"{kind}.forward"] * 2 + [f"{kind}.backward"] * 2)
    want = plain(data.x, data.edge_index, edge_attr=data.edge_attr)[batch.n_id[: batch.batch_size]]
    assert torch.allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("kind", [GATConv, TransformerConv])
def test_autocast_and_other_types_run_as_pyg_wrote_them(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(single(kind(WIDTH, 4).float()), solo_mesh())
    with _counted(monkeypatch) as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        model(make_batch(1).x.float(), make_batch(1).edge_index)
        assert calls == []
    half = parallelize(single(kind(WIDTH, 4).bfloat16()), solo_mesh())
    with _counted(monkeypatch) as calls:
        batch = make_batch(1).cast(torch.bfloat16)
        half(batch.x, batch.edge_index)
        assert calls == []


def test_a_hook_that_comes_later_is_seen_and_a_gone_one_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = parallelize(single(GATConv(WIDTH, 4).double()), solo_mesh()), make_batch(1)
    before, _ = _train_step(model, batch)
    layer: Any = model.layer
    handle = layer.register_forward_hook(lambda module, inputs, out: 3 * out)
    assert torch.allclose(_train_step(model, batch)[0], 3 * before, atol=1e-12)
    handle.remove()
    with _counted(monkeypatch) as calls:
        assert torch.equal(_train_step(model, batch)[0], before)
    assert len(calls) == 2


def test_a_hook_on_all_modules_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = parallelize(single(GATConv(WIDTH, 4).double()), solo_mesh()), make_batch(1)
    shapes: list[Any] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, out: shapes.append(out.shape))
    with _counted(monkeypatch) as calls:
        _train_step(model, batch)
    handle.remove()
    assert calls == [] and (20, 4) in shapes


@pytest.mark.parametrize("kind", KINDS)
def test_inference_uses_them_and_gives_what_pyg_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, data = make_model(kind, num_layers=2, jk="cat", dropout=0.3, **SIZES).double().eval(), make_data()
    model = parallelize(copy.deepcopy(plain), solo_mesh())
    with _counted(monkeypatch) as calls:
        found = gsplit.infer(model, data)
    assert calls and all(name.endswith(".forward") for name in calls)
    assert torch.allclose(torch.as_tensor(found), plain(data.x, data.edge_index), atol=1e-11)


def test_layers_on_the_same_edges_share_them_and_differ_in_self_loops() -> None:
    def forward(self: Any, x: Any, edge_index: Any) -> Any:
        return self.a(x, edge_index) + self.b(x, edge_index) + self.c(x, edge_index) + self.d(x, edge_index)

    layers = [GATConv(WIDTH, 4, 2), GATConv(WIDTH, 4, 2, add_self_loops=False), GATv2Conv(WIDTH, 4, 2)]
    layers.append(TransformerConv(WIDTH, 4, 2))
    model = Stack(forward, **dict(zip("abcd", (layer.double() for layer in layers), strict=True)))
    data, batch, plain = make_data(), make_loader(1).make_batch(0, 0), copy.deepcopy(model)
    out = parallelize(model, solo_mesh())(batch.x, batch.edge_index)
    assert torch.allclose(out, plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]], atol=1e-12)


@pytest.mark.parametrize("kind, options", [(GATConv, {"add_self_loops": False}), (TransformerConv, {})])
def test_a_mini_batch_without_edges_counts_its_dropout_calls(kind: Any, options: dict[str, bool]) -> None:
    """PyG's GATConv makes none without edges, and the next one would be taken for it."""

    def forward(self: Any, x: Any, edge_index: Any) -> Any:
        return F.dropout(self.layer(x, edge_index), 0.5, self.training)

    data = make_data()
    data.edge_index = data.edge_index[:, :0]
    layer = kind(WIDTH, 4, dropout=0.5, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.ones_(layer.bias if kind is GATConv else layer.lin_skip.bias)
    model = parallelize(Stack(forward, layer=layer), solo_mesh())
    batch = gsplit.NeighborLoader(data, [-1], torch.arange(20), batch_size=20).make_batch(0, 0)
    out = model(batch.x, batch.edge_index)
    assert set(out.flatten().tolist()) == {0.0, 2.0}
