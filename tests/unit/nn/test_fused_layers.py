"""Layers that host kernels compute: equal to PyG's, used where that is exact, with the ReLU that follows applied."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, Stack, make_batch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GIN, MLP, GCNConv, GINConv, GraphConv, GraphSAGE, Linear, SAGEConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import scatter

from gsplit import NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.features.in_place import InPlaceRows
from gsplit.features.sources import torch_dtype
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.sums import EdgeSums
from gsplit.nn import adapters
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.fused_layers import Activation, LayerRows, linear_form, run_linear_form, run_linears
from gsplit.nn.parallelize import forward_plan_of
from gsplit.store.build import build_store
from gsplit.store.feature_types import feature_values, write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """One entry per layer that the kernels compute inside: whether it applied the ReLU that follows."""
    calls: list[bool] = []

    def counting(real: Callable[..., Tensor], *args: Any) -> Tensor:
        calls.append(args[-1] is not None)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "run_linear_form", partial(counting, run_linear_form))
        patch.setattr(adapters, "run_linears", partial(counting, run_linears))
        yield calls


def _train_step(model: Module, batch: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    out = model(batch.x, batch.edge_index)
    batch.sum(out.square().sum(1)).backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _check_equal(model: Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A training step with the kernels and by PyG's layers; returns the calls of the kernels."""
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(model, batch)
    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "allows_fused", False)
        want, wanted = _train_step(model, batch)
    tolerance = 1e-11 if out.dtype == torch.float64 else 1e-4
    assert torch.allclose(out, want, rtol=tolerance, atol=tolerance)
    assert len(grads) == len(wanted)
    for one, other in zip(grads, wanted, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, float(other.abs().max())))
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=p),
        lambda p: GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=p, aggr="sum", root_weight=False, bias=False),
        lambda p: GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=p, aggr="max"),
        lambda p: GCN(WIDTH, 8, 3, CLASSES, dropout=p),
        lambda p: GCN(WIDTH, 8, 3, CLASSES, dropout=p, add_self_loops=False, bias=False),
        lambda p: GIN(WIDTH, 8, 3, CLASSES, dropout=p),
        lambda p: GIN(WIDTH, 8, 3, CLASSES, dropout=p, train_eps=True, eps=0.3),
    ],
)
def test_a_wrapped_model_is_computed_by_host_kernels_that_apply_its_relu(
    make: Callable[[float], Module], dropout: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parallelize(make(dropout).to(dtype), solo_mesh())
    names = list(model.state_dict())
    batch = make_batch().cast(dtype)
    assert forward_plan_of(model).activations == {"convs.0", "convs.1"}
    assert _check_equal(model, batch, monkeypatch) == [True, True, False]
    model.eval()
    with torch.no_grad(), _counted(monkeypatch) as calls:
        out = model(batch.x, batch.edge_index)
    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "allows_fused", False)
        assert torch.allclose(out, model(batch.x, batch.edge_index), atol=1e-11 if dtype == torch.float64 else 1e-4)
    assert calls == [True, True, False] and list(model.state_dict()) == names


def _two_layers(forward: Callable[..., Any], **modules: Module) -> Any:
    layers = {"one": SAGEConv(WIDTH, 8).double(), "two": GraphConv(8, CLASSES, aggr="mean").double()}
    return Stack(forward, **layers, **modules)


class _Double(torch.autograd.Function):
    """Reads its input as no torch function does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def _relu_method(self: Any, x: Tensor, edge_index: Any) -> Any:
    return self.two(self.one(x, edge_index).relu(), edge_index)


def _relu_and_read_before(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = self.one(x, edge_index)
    return self.two(F.relu(h) + h, edge_index)


def _read_by_a_function_of_its_own(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = self.one(x, edge_index)
    return self.two(F.relu(h) + _Double.apply(h), edge_index)  # type: ignore[no-untyped-call]


def _kept_in_an_attribute(self: Any, x: Tensor, edge_index: Any) -> Any:
    self.kept = self.one(x, edge_index)
    return self.two(F.relu(self.kept), edge_index)


def _relu_in_place(self: Any, x: Tensor, edge_index: Any) -> Any:
    return self.two(F.relu_(self.one(x, edge_index)), edge_index)


def _elu(self: Any, x: Tensor, edge_index: Any) -> Any:
    return self.two(F.elu(self.one(x, edge_index)), edge_index)


def _cut_before_relu(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = self.one(x, edge_index)
    return self.two(torch.cat([F.relu(h[:, :4]), h[:, 4:]], 1), edge_index)


def _relu_read_beside_its_dropout(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = F.relu(self.one(x, edge_index))
    return self.two(F.dropout(h, 0.5, self.training) + h, edge_index)


def _relu_then_dropout(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = F.relu(self.one(x, edge_index))
    return self.two(F.dropout(h, 0.5, self.training), edge_index)


def _dropout_changed_in_place(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = F.dropout(F.relu(self.one(x, edge_index)), 0.5, self.training)
    h += 1
    return self.two(h, edge_index)


def _relu_twice(self: Any, x: Tensor, edge_index: Any) -> Any:
    h = self.one(x, edge_index)
    return self.two(F.relu(h) + 2 * F.relu(h), edge_index)


def _two_branches(self: Any, x: Tensor, edge_index: Any) -> Any:
    h, other = self.one(x, edge_index), self.other(x, edge_index)
    return self.two(F.relu(h) + F.relu(other), edge_index)


@pytest.mark.parametrize(
    ("forward", "applied", "activations"),
    [
        (_relu_method, True, {"one"}),
        (_relu_then_dropout, True, {"one"}),
        (_relu_read_beside_its_dropout, True, {"one"}),
        (_dropout_changed_in_place, True, {"one"}),
        (_relu_twice, False, set()),
        (_relu_and_read_before, False, set()),
        (_read_by_a_function_of_its_own, False, set()),
        (_kept_in_an_attribute, False, set()),
        (_relu_in_place, False, set()),
        (_elu, False, set()),
        (_cut_before_relu, False, set()),
    ],
)
def test_a_relu_is_applied_by_the_layer_only_if_nothing_else_reads_the_output(
    forward: Any, applied: bool, activations: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parallelize(_two_layers(forward), solo_mesh())
    assert forward_plan_of(model).activations == activations
    assert _check_equal(model, make_batch(2), monkeypatch) == [applied, False]


def test_layers_beside_each_other_both_apply_their_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(_two_layers(_two_branches, other=SAGEConv(WIDTH, 8).double()), solo_mesh())
    assert _check_equal(model, make_batch(2), monkeypatch) == [True, True, False]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _read_later(self: Any, x: Tensor, edge_index: Any) -> Any:
    """What ``self.mode`` says, which is another thing at wrapping."""
    h = self.one(x, edge_index)
    if self.mode == "tanh":
        return self.two(h.tanh(), edge_index)
    if self.mode == "layer":
        return self.two(h, edge_index)
    if self.mode == "kept without a relu":
        self.kept = h
        return self.two(x.new_ones(h.size(0), 8), edge_index)
    if self.mode == "relu without gradients":
        with torch.no_grad():
            r = F.relu(h)
        return self.two(r, edge_index)
    if self.mode == "function with a backward of its own":
        return self.two(_StraightThrough.apply(h), edge_index)  # type: ignore[no-untyped-call]
    r = F.relu(h)
    if self.mode == "added":
        r = r + h
    if self.mode == "relu again":
        r = r + F.relu(h)
    if self.mode == "kept":
        self.kept = h
    if self.mode == "listed":
        self.kept = torch.tensor(h.detach().tolist(), dtype=x.dtype)
    if self.mode == "hook":
        h.register_hook(lambda g: g.clamp(max=0.01))
    return self.two(r, edge_index)


@pytest.mark.parametrize(
    "mode",
    [
        "relu",
        "tanh",
        "layer",
        "kept without a relu",
        "relu without gradients",
        "function with a backward of its own",
        "added",
        "relu again",
        "kept",
        "listed",
        "hook",
    ],
)
def test_an_output_that_is_read_otherwise_after_all_has_its_values_before_the_relu(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _two_layers(_read_later)
    vars(model)["mode"] = "relu"
    model = parallelize(model, solo_mesh())
    assert forward_plan_of(model).activations == {"one"}
    vars(model)["mode"] = mode
    assert _check_equal(model, make_batch(2), monkeypatch) == [True, False]
    if mode in ("kept", "listed", "kept without a relu"):
        want = vars(model)["kept"].clone()  # of the step without kernels, which was the last
        model(make_batch(2).x, make_batch(2).edge_index)
        assert torch.allclose(vars(model)["kept"], want, atol=1e-11) and bool((want < 0).any())


def test_hooks_on_the_relu_see_what_it_sees_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Any:
        return self.two(F.dropout(self.act(self.one(x, edge_index)), 0.5, self.training), edge_index)

    model = parallelize(_two_layers(forward, act=torch.nn.ReLU()), solo_mesh())
    seen: list[Any] = []
    model.act.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    assert _check_equal(model, make_batch(2), monkeypatch) == [True, False]
    (given, out), (want_given, want_out) = seen
    assert torch.allclose(given, want_given, atol=1e-11) and torch.allclose(out, want_out, atol=1e-11)
    assert bool((given < 0).any())


def test_hooks_that_copy_saved_tensors_do_not_change_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(_two_layers(_relu_then_dropout), solo_mesh())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        assert _check_equal(model, make_batch(2), monkeypatch) == [True, False]


def test_a_relu_may_be_in_a_part_that_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Any:
        h = checkpoint(lambda h: self.lin(F.relu(h)), self.one(x, edge_index), use_reentrant=False)
        return self.two(h, edge_index)

    model = parallelize(_two_layers(forward, lin=torch.nn.Linear(8, 8).double()), solo_mesh())
    assert len(_check_equal(model, make_batch(2), monkeypatch)) == 2


@pytest.mark.parametrize(
    ("layer", "name"), [(SAGEConv, "lin_r"), (SAGEConv, "aggr_module"), (GraphConv, "lin_root"), (GCNConv, "lin")]
)
def test_a_part_that_pygs_layer_does_not_have_is_not_left_out(
    layer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer(WIDTH, CLASSES).double()
    biased = Linear(WIDTH, CLASSES, bias=True).double()
    torch.nn.init.ones_(biased.bias)
    setattr(layer, name, SumAggregation() if name == "aggr_module" else biased)
    data = Data(x=torch.randn(20, WIDTH).double(), edge_index=torch.randint(0, 20, (2, 60)), y=torch.arange(20))
    model = parallelize(Stack(lambda self, x, edges: self.layer(x, edges), layer=copy.deepcopy(layer)), solo_mesh())
    batch = NeighborLoader(data, [-1], None, batch_size=20).make_batch(0, 0)
    with _counted(monkeypatch) as calls:
        out = model(batch.x, batch.edge_index)
    assert calls == []
    assert torch.allclose(out, layer(data.x, data.edge_index)[batch.n_id[:20]], atol=1e-11)


def test_hooks_of_users_see_what_pygs_layers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(_two_layers(_relu_method), solo_mesh())
    seen: list[Tensor] = []
    model.one.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    assert _check_equal(model, make_batch(2), monkeypatch) == [False, False]  # no ReLU: the hook sees the output
    assert torch.allclose(seen[0], seen[1], atol=1e-11) and bool((seen[0] < 0).any())
    inner = parallelize(_two_layers(_relu_method), solo_mesh())
    inner.one.lin_l.register_forward_hook(lambda module, args, out: out * 3)
    assert _check_equal(inner, make_batch(2), monkeypatch) == [False]  # only the second layer


@pytest.mark.parametrize(
    "layer",
    [
        SAGEConv(WIDTH, 8, aggr="min"),
        SAGEConv(WIDTH, 8, normalize=True),
        SAGEConv(WIDTH, 8, project=True),
        GINConv(Linear(WIDTH, 8), aggr="mean"),
        GINConv(Linear(WIDTH, 8), aggr="max"),
        GraphConv(WIDTH, 8, aggr="min"),
    ],
)
def test_other_layers_and_options_run_as_pygs_layers(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = copy.deepcopy(layer).double()
    model = Stack(_relu_method, one=layer, two=GCNConv(8, CLASSES).double())
    model = parallelize(model, solo_mesh())
    assert _check_equal(model, make_batch(2), monkeypatch) == [False]  # the second


@pytest.mark.parametrize("kind", [SAGEConv, GraphConv, GCNConv, GINConv])
def test_the_first_layer_reads_input_rows_where_they_lie(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Sequential(Linear(WIDTH, CLASSES))
    layer = (GINConv(network, 0.5, train_eps=True) if kind is GINConv else kind(WIDTH, CLASSES)).double()
    model = parallelize(Stack(lambda self, x, edge_index: self.layer(x, edge_index), layer=layer), solo_mesh())
    batch = make_batch(1)
    assert isinstance(batch.x, InPlaceRows)
    out, grads = _train_step(model, batch)
    assert not batch.x.is_read
    plain = replace(batch, x=batch.x.read())
    want, wanted = _train_step(model, plain)
    assert torch.equal(out, want) and all(map(torch.equal, grads, wanted))
    assert _check_equal(model, make_batch(1), monkeypatch) == [False]


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "int8", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [SAGEConv, GraphConv, GCNConv])
def test_the_first_layer_decodes_rows_of_fewer_bits(
    kind: Any, dtype: torch.dtype, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = PlantedGraph(300, 3000, num_communities=4, num_features=WIDTH, num_classes=CLASSES)
    plain = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    store = write_with_features(plain, tmp_path / "c.gsplit", stored)
    layer = kind(WIDTH, CLASSES).to(dtype)
    model = parallelize(Stack(lambda self, x, edge_index: self.layer(x, edge_index), layer=layer), solo_mesh())
    batch = NeighborLoader(store, [5], "train", batch_size=40).make_batch(0, 0).cast(dtype)
    assert isinstance(batch.x, InPlaceRows) and batch.x.array.dtype == torch_dtype(stored)
    with _counted(monkeypatch) as calls:
        out, grads = _train_step(model, batch)
    assert calls == [False] and not batch.x.is_read
    values = torch.from_numpy(feature_values(store, "x", slice(None))).to(dtype)
    want, wanted = _train_step(model, replace(batch, x=values[batch.input_ids]))
    assert torch.equal(out, want) and all(map(torch.equal, grads, wanted))
    assert _check_equal(model, batch, monkeypatch) == [False]


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "make",
    [lambda: SAGEConv(WIDTH, CLASSES, aggr="max"), lambda: GINConv(Linear(WIDTH, CLASSES), train_eps=True)],
    ids=["max", "GIN"],
)
def test_a_first_layer_that_does_not_decode_reads_decoded_rows(
    make: Any, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = PlantedGraph(300, 3000, num_communities=4, num_features=WIDTH, num_classes=CLASSES)
    plain = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    store = write_with_features(plain, tmp_path / "c.gsplit", stored)
    model = parallelize(Stack(lambda self, x, edge_index: self.layer(x, edge_index), layer=make()), solo_mesh())
    batch = NeighborLoader(store, [5], "train", batch_size=40).make_batch(0, 0).cast(torch.float32)
    assert isinstance(batch.x, InPlaceRows) and batch.x.array.dtype == torch_dtype(stored)
    out, grads = _train_step(model, batch)
    assert batch.x.is_read
    values = torch.from_numpy(feature_values(store, "x", slice(None))).to(torch.float32)
    want, wanted = _train_step(model, replace(batch, x=values[batch.input_ids]))
    assert torch.equal(out, want) and all(map(torch.equal, grads, wanted))


class _Weighted(Module):
    """Four layers on one block, with and without edge weights."""

    def __init__(self, aggr: str, weighted_first: bool) -> None:
        super().__init__()
        self.layers = ModuleList([GraphConv(WIDTH, CLASSES, aggr=aggr) for _ in range(2)])
        self.layers += [GCNConv(WIDTH, CLASSES) for _ in range(2)]
        self.weighted_first = weighted_first

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any = None) -> Any:
        weights = [edge_weight, None] if self.weighted_first else [None, edge_weight]
        rows = [layer(x, edge_index, weight) for layer, weight in zip(self.layers, 2 * weights, strict=True)]
        return rows[0] - 2 * rows[1] + 3 * rows[2] - 4 * rows[3]


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted_first", [False, True])
def test_layers_with_and_without_edge_weights_share_a_block(
    aggr: str, weighted_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = torch.randint(0, 20, (2, 80), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(80, dtype=torch.float64) + 0.5
    data = Data(x=torch.randn(20, WIDTH).double(), edge_index=edges, edge_weight=weights, y=torch.arange(20) % 3)
    plain = _Weighted(aggr, weighted_first).double()
    model = parallelize(copy.deepcopy(plain), solo_mesh())
    batch = NeighborLoader(data, [-1], None, batch_size=20, edge_weight="edge_weight").make_batch(0, 0)
    with _counted(monkeypatch) as calls:
        out = model(batch.x, batch.edge_index, batch.edge_weight)
    # GCN multiplies first: all rows are destinations here; a max of rows with weights is PyG's
    assert calls == [False] * (1 if aggr == "max" else 2)
    want = plain(data.x, data.edge_index, data.edge_weight)[batch.n_id[:20]]
    assert torch.allclose(out, want, atol=1e-11)
    grads = torch.autograd.grad(batch.sum(out.square().sum(1)), list(model.parameters()))
    wanted = torch.autograd.grad(want.square().sum(), list(plain.parameters()))
    assert all(map(partial(torch.allclose, atol=1e-10), grads, wanted))


def test_rows_of_another_width_are_refused_by_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(_two_layers(_relu_method), solo_mesh())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), _counted(monkeypatch) as calls:
        model(torch.ones(make_batch(2).x.size(0), WIDTH + 1, dtype=torch.float64), make_batch(2).edge_index)
    assert calls == []


@pytest.mark.parametrize("num_dst", [0, 1, 9000])
def test_threads_and_empty_blocks_change_no_bits(num_dst: int) -> None:
    torch.manual_seed(0)
    num_src = num_dst + 40
    degrees = torch.randint(0, 4, (num_dst,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    src_rows = torch.randint(0, num_src, (int(indptr[-1]),))
    layer = SAGEConv(5, 3)
    form = linear_form(layer)
    assert form is not None
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(1)
            x = torch.randn(num_src, 5, requires_grad=True)
            activation = Activation()
            factor = torch.tensor([1.5], requires_grad=True)
            edges = EdgeSums(indptr, src_rows, num_src, None)
            rows = LayerRows(x, None, edges, None, BufferPool(torch.device("cpu")))
            out = activation.relu(run_linear_form(form, rows, activation))
            own = rows.aggregate(factor=factor)
            largest = rows.aggregate(reduction="max", appends_dst=True)
            total = out.sum() + own.square().sum() + largest.square().sum()
            found.append((out, own, largest, *torch.autograd.grad(total, (x, factor))))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    assert found[0][0].shape == (num_dst, 3) and found[0][1].shape == (num_dst, 5)


def test_gradients_of_gins_sum_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    edges = EdgeSums(torch.tensor([0, 3, 3, 4]), torch.tensor([4, 0, 4, 2]), 5, None)
    x, other = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    factor = torch.tensor([1.7], dtype=torch.float64)

    def aggregate(x: Tensor, dst: Tensor | None, factor: Tensor) -> Tensor:
        return LayerRows(x, dst, edges, None, BufferPool(torch.device("cpu"))).aggregate(factor=factor)

    for each in (x, other, factor):
        each.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, factor: aggregate(x, None, factor), (x, factor))
    assert torch.autograd.gradcheck(aggregate, (x, other, factor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), float("-inf"), -0.0])
def test_a_max_has_pygs_values_and_gradients(special: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_dst, num_src, width = 50, 80, 19
    degrees = torch.randint(0, 7, (num_dst,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    src_rows = torch.randint(0, num_src, (int(indptr[-1]),))
    x = torch.randint(-3, 2, (num_src, width)).to(dtype)  # many ties, many of them at 0
    if special is not None:
        x[torch.rand(num_src, width) < 0.05] = special
    g = torch.randn(num_dst, width, dtype=dtype)
    g[::9] = float("inf") if special is None else 0
    dst = torch.repeat_interleave(torch.arange(num_dst), degrees)
    assert bool((degrees == 0).any()) and g.isinf().any() == (special is None)
    x.requires_grad_()
    want = scatter(x[src_rows], dst, 0, dim_size=num_dst, reduce="max")
    (wanted,) = torch.autograd.grad(want, x, g)
    rows = LayerRows(x, None, EdgeSums(indptr, src_rows, num_src, None), None, BufferPool(torch.device("cpu")))
    out = rows.aggregate(reduction="max")
    (found,) = torch.autograd.grad(out, x, g)
    assert torch.equal(out.nan_to_num(7), want.nan_to_num(7)) and torch.equal(out.isnan(), want.isnan())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


class _OwnLinear(torch.nn.Linear):
    """A subclass, which may do anything."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def _with_hook(network: Any, part: Any) -> Any:
    part.register_forward_hook(lambda module, args, out: out * 3)
    return network


def _replaced(network: Any) -> Any:
    network[0].forward = lambda x: x.repeat(1, 2)[:, :8]
    return network


_SHARED = torch.nn.Linear(8, 8)
_NETWORK = torch.nn.Sequential(Linear(WIDTH, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("network", "calls"),
    [
        (_NETWORK, [True, False]),
        (torch.nn.Sequential(*_NETWORK, torch.nn.ReLU(inplace=True)), [True, False]),
        (torch.nn.Sequential(*_NETWORK, _SHARED, torch.nn.ReLU(), torch.nn.ReLU(), _SHARED), [True, False]),
        (torch.nn.Sequential(torch.nn.Linear(WIDTH, 8, bias=False)), [True, False]),
        (MLP([WIDTH, 7, 8], norm=None), [True, False]),
        (MLP([WIDTH, 7, 8], norm=None, plain_last=False, act_first=True, bias=False), [True, False]),
        (MLP([WIDTH, 7, 8], norm=None, act=None), [True, False]),
        (MLP([WIDTH, 7, 8], norm=None, act="elu"), [False]),
        (MLP([WIDTH, 7, 8], norm=None, dropout=0.5), [False]),
        (MLP([WIDTH, 7, 8], norm="batch_norm"), [False]),
        (Linear(WIDTH, 8), [False]),
        (torch.nn.Sequential(torch.nn.ReLU(), *_NETWORK), [False]),
        (torch.nn.Sequential(*_NETWORK, torch.nn.Dropout(0.5)), [False]),
        (torch.nn.Sequential(_OwnLinear(WIDTH, 8)), [False]),
        (_with_hook(one := copy.deepcopy(_NETWORK), one), [False]),
        (_with_hook(one := copy.deepcopy(_NETWORK), one[0]), [False]),
        (_with_hook(one := copy.deepcopy(_NETWORK), one[1]), [False]),
        (_replaced(copy.deepcopy(_NETWORK)), [False]),
        (torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, 8))), [False]),
    ],
)
@pytest.mark.parametrize("train_eps", [False, True])
def test_gin_sums_rows_and_computes_or_calls_its_network(
    network: Any, train_eps: bool, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = GINConv(copy.deepcopy(network), 0.25, train_eps).double()
    model = parallelize(Stack(_relu_method, one=layer, two=GCNConv(8, CLASSES).double()), solo_mesh())
    factors: list[float] = []
    real = LayerRows.aggregate

    def aggregate(rows: LayerRows, **options: Any) -> Tensor:
        factors.extend([] if options.get("factor") is None else [options["factor"].item()])
        return real(rows, **options)

    monkeypatch.setattr(LayerRows, "aggregate", aggregate)
    assert _check_equal(model, make_batch(2), monkeypatch) == calls
    assert factors == [1.25]


def test_gin_runs_as_pygs_layer_where_eps_is_not_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GINConv(copy.deepcopy(_NETWORK)).double()
    layer.eps = torch.arange(WIDTH, dtype=torch.float64)
    model = parallelize(Stack(_relu_method, one=layer, two=GCNConv(8, CLASSES).double()), solo_mesh())
    assert _check_equal(model, make_batch(2), monkeypatch) == [False]


def test_rows_of_a_damaged_block_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected source rows in \[0, 3\) \(got 1..3\)"):
        EdgeSums(torch.tensor([0, 2]), torch.tensor([1, 3]), 3, None)
