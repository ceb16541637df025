"""Wrapped models on one process: what PyG computes on the full graph, nothing changed that a user would notice, and
refusals with reasons. Real ranks are in tests/dist/test_models.py.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, PNA, EdgeCNN, GATConv, GCNConv, GraphSAGE, MessagePassing, SAGEConv

from gsplit import InputError, NeighborLoader, parallelize
from gsplit.batch import Batch
from gsplit.bench.exactness import Case, make_model
from gsplit.distributed.mesh import Mesh, solo_mesh
from gsplit.nn.parallelize import _Hook
from gsplit.run.models import MODELS

N, WIDTH, CLASSES = 60, 6, 5


def _data(seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    src, dst = (N * rng.random(240) ** 2).astype(np.int64), rng.integers(0, N - 4, 240)
    src[:8] = dst[:8]
    edges = np.unique(np.stack([src, dst]), axis=1)
    x = torch.from_numpy(rng.normal(size=(N, WIDTH)))
    return Data(x=x, edge_index=torch.from_numpy(edges), y=torch.from_numpy(rng.integers(0, CLASSES, N)))


def _loader(num_layers: int = 3, fanout: int = -1, **options: Any) -> NeighborLoader:
    return NeighborLoader(_data(), [fanout] * num_layers, torch.arange(0, N, 3), 20, quiet=True, **options)


def _batch(num_layers: int = 3, fanout: int = -1, **options: Any) -> Batch:
    return _loader(num_layers, fanout, **options).make_batch(0, 0)


def _plain_gcn_edges(data: Data) -> dict[str, Any]:
    edges, weights = pyg.conv.gcn_conv.gcn_norm(data.edge_index, None, N, dtype=torch.float64)
    return {"edge_index": edges, "edge_weight": weights}


@pytest.mark.parametrize("strategy", ["split", "data"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("jk", [None, "cat", "lstm"])
def test_with_all_neighbours_it_is_pyg_on_the_full_graph(kind: str, jk: str | None, strategy: str) -> None:
    data, case = _data(), Case(kind, strategy, "random", 0.0, jk, None)
    plain, ours = make_model(case), parallelize(make_model(case), solo_mesh())
    batch = _batch(strategy=strategy, gcn_norm=kind == "gcn")
    edges = _plain_gcn_edges(data) if kind == "gcn" else {"edge_index": data.edge_index}
    targets = batch.n_id[: batch.batch_size]
    want = plain(data.x, **edges)[targets]
    out = ours(batch.x, batch.edge_index, **({"edge_weight": batch.edge_weight} if kind == "gcn" else {}))
    assert torch.allclose(out, want, atol=1e-11)
    F.cross_entropy(want, data.y[targets]).backward()
    batch.mean(F.cross_entropy(out, batch.y, reduction="none")).backward()
    for got, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None)
        if got.grad is not None and wanted.grad is not None:
            assert torch.allclose(got.grad, wanted.grad, atol=1e-11)


def test_called_with_tensors_it_is_the_model_it_was() -> None:
    data, case = _data(), Case("sage", "split", "random", 0.5, None, "batch_norm")
    plain, ours = make_model(case), parallelize(make_model(case), solo_mesh())
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))
    outs = []
    for model in (plain, ours):
        torch.manual_seed(1)
        outs.append(model(data.x, data.edge_index))
    assert torch.equal(*outs)


def test_wrapping_leaves_the_generator_and_the_modes_alone() -> None:
    model = make_model(Case("gat", "split", "random", 0.5, None, "batch_norm")).eval()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parallelize(model, solo_mesh())
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())


def test_dropout_is_a_function_of_the_step() -> None:
    model = parallelize(GAT(WIDTH, 8, 3, CLASSES, dropout=0.5).double(), solo_mesh())
    loader = _loader(fanout=3)
    one, again, other = (
        model(b.x, b.edge_index) for b in (loader.make_batch(2, 0), loader.make_batch(2, 0), loader.make_batch(3, 0))
    )
    assert torch.equal(one, again)
    assert one.shape != other.shape or not torch.equal(one, other)
    model.eval()
    batch = loader.make_batch(2, 0)
    assert not torch.equal(model(batch.x, batch.edge_index), one)


def test_two_batches_live_at_once() -> None:
    model = parallelize(GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=0.5).double(), solo_mesh())
    loader = _loader(fanout=2)
    batches = [loader.make_batch(epoch, 0) for epoch in (0, 1)]

    def gradient(number: int) -> Tensor:
        out = model(batches[number].x, batches[number].edge_index)
        (g,) = torch.autograd.grad(out.square().sum(), [model.convs[0].lin_l.weight])
        assert isinstance(g, Tensor)
        return g

    alone = [gradient(0), gradient(1)]
    outs = [model(b.x, b.edge_index).square().sum() for b in batches]
    for out, want in zip(reversed(outs), reversed(alone), strict=True):
        assert torch.allclose(torch.autograd.grad(out, [model.convs[0].lin_l.weight])[0], want)


def test_a_copy_works_and_a_saved_model_asks_for_its_ranks() -> None:
    model = parallelize(
        PNA(WIDTH, 8, 3, CLASSES, aggregators=["mean"], scalers=["identity"], deg=torch.ones(3)).double(), solo_mesh()
    )
    batch = _batch()
    want = model(batch.x, batch.edge_index)
    assert torch.equal(copy.deepcopy(model)(batch.x, batch.edge_index), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    data = _data()
    assert torch.equal(loaded(data.x, data.edge_index), model(data.x, data.edge_index))
    with pytest.raises(InputError, match=r"the model: expected to know its ranks .*parallelize\(model, mesh\) again"):
        loaded(batch.x, batch.edge_index)
    assert torch.equal(parallelize(loaded, solo_mesh())(batch.x, batch.edge_index), want)
    assert torch.equal(
        parallelize(model, solo_mesh())(batch.x, batch.edge_index), want
    )  # once more: hooks do not pile up
    assert len(model._forward_pre_hooks) == 1


class Stack(Module):
    """A model whose forward is given."""

    def __init__(self, forward: Callable[..., Any], **modules: Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self._forward(self, x, edge_index)


def _two() -> dict[str, Module]:
    return {"a": SAGEConv(WIDTH, WIDTH).double(), "b": SAGEConv(WIDTH, WIDTH).double()}


def test_hand_written_models_with_branches_encoders_and_trimmed_residuals() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(self.encode(x), 0.0, self.training)
        h = self.a(x, edge_index) + self.side(x, edge_index)
        h = x[: h.size(0)] + h.relu()
        out: Tensor = self.b(h, edge_index)
        kept: Tensor = h[: out.size(0)]
        return kept + out

    model = Stack(forward, encode=torch.nn.Linear(WIDTH, WIDTH).double(), side=GATConv(WIDTH, WIDTH).double(), **_two())
    plain = copy.deepcopy(model)
    ours, data, batch = parallelize(model, solo_mesh()), _data(), _batch(2)
    want = plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
    out = ours(batch.x, batch.edge_index)
    assert torch.allclose(out, want, atol=1e-12)
    out.square().sum().backward()
    want.square().sum().backward()
    for got, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None
        assert torch.allclose(got.grad, wanted.grad, atol=1e-11)


class ByBatch(Module):
    """Takes the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, CLASSES, normalize=False).double()

    def forward(self, batch: Any) -> Tensor:
        return self.conv(batch.x, batch.edge_index, edge_weight=batch.edge_weight)  # type: ignore[no-any-return]


def test_a_model_can_take_the_batch() -> None:
    model, data = parallelize(ByBatch(), solo_mesh()), _data()
    batch = _batch(1, gcn_norm=True)
    full = GCNConv(WIDTH, CLASSES).double()
    full.load_state_dict(model.conv.state_dict())
    assert torch.allclose(model(batch), full(data.x, data.edge_index)[batch.n_id[: batch.batch_size]], atol=1e-12)


class OwnSquare(MessagePassing):  # type: ignore[misc]
    """A layer of the user's that knows one tensor of rows only."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = torch.nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x) + self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return x_j - x_i


def test_layers_of_the_users_are_tried_with_one_tensor_too() -> None:
    model = Stack(lambda self, x, e: self.b(self.a(x, e), e), a=OwnSquare(), b=OwnSquare())
    plain, data, batch = copy.deepcopy(model), _data(), _batch(2)
    out = parallelize(model, solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index)
    assert torch.allclose(out, plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]], atol=1e-12)


class BothWays(MessagePassing):  # type: ignore[misc]
    """Looks along the edges in both directions."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) + self.propagate(edge_index.flip(0), x=x)  # type: ignore[no-any-return]


class TrainedGate(Module):
    """Mixes rows behind a gate that starts closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.gate * h.mean(0)


class OwnNorm(Module):
    """Batch statistics in training only."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


class DegreeSquare(OwnSquare):
    """Looks at the other destinations of the block."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), edge_index)


def _sage(**options: Any) -> Module:
    model: Module = GraphSAGE(WIDTH, 8, 3, CLASSES, **options)
    return model


def _seq(layer: Module) -> Module:
    return Stack(lambda self, x, e: self.layer(x, e), layer=layer)


REFUSALS: list[tuple[str, Callable[[], Module], str]] = [
    ("sg", lambda: _seq(pyg.SGConv(WIDTH, 4, K=2)), r"layer \(SGConv\): .*further than one hop.*one-hop layers"),
    ("tag", lambda: _seq(pyg.TAGConv(WIDTH, 4)), r"layer \(TAGConv\): .*further than one hop"),
    ("cheb", lambda: _seq(pyg.ChebConv(WIDTH, 4, K=3)), r"layer \(ChebConv\): .*further than one hop"),
    ("arma", lambda: _seq(pyg.ARMAConv(WIDTH, 4)), r"layer \(ARMAConv\): .*further than one hop"),
    ("appnp", lambda: _seq(pyg.APPNP(4, 0.1)), r"layer \(APPNP\): .*further than one hop"),
    (
        "gps",
        lambda: _seq(pyg.GPSConv(WIDTH, SAGEConv(WIDTH, WIDTH), heads=2)),
        r"layer \(GPSConv\): .*mixes all vertices",
    ),
    ("gcn", lambda: GCN(WIDTH, 8, 3, CLASSES), r"convs.0 \(GCNConv\): .*normalize=True.*gcn_norm=True"),
    (
        "lstm",
        lambda: _sage(aggr="lstm"),
        r"convs.0 \(SAGEConv\): .*LSTMAggregation, which fails on vertices without edges",
    ),
    ("median", lambda: _sage(aggr="median"), r"convs.0 \(SAGEConv\): .*MedianAggregation"),
    (
        "layer norm",
        lambda: _sage(norm="layer_norm"),
        r"norms.0 \(LayerNorm\): .*mode='graph'.*LayerNorm\(mode='node'\)",
    ),
    ("graph norm", lambda: _sage(norm="graph_norm"), r"norms.0 \(GraphNorm\): .*mixes all vertices"),
    ("pair norm", lambda: _sage(norm="pair_norm"), r"norms.0 \(PairNorm\): .*mixes all vertices"),
    ("instance norm", lambda: _sage(norm="instance_norm"), r"norms.0 \(InstanceNorm\): .*mixes all vertices"),
    ("size norm", lambda: _sage(norm=pyg.GraphSizeNorm()), r"norms.0 \(GraphSizeNorm\): .*mixes all vertices"),
    ("single", lambda: _sage(norm="batch_norm", norm_kwargs={"allow_single_element": True}), "allow_single_element"),
    (
        "no statistics",
        lambda: _sage(norm=torch.nn.BatchNorm1d(8, track_running_stats=False)),
        "keeps no running statistics",
    ),
    ("sync", lambda: _sage(norm=torch.nn.SyncBatchNorm(8)), "process group of its own.*BatchNorm1d"),
    ("lazy", lambda: GraphSAGE(-1, 8, 3, CLASSES), "its size is not known yet.*instead of -1"),
    ("flow", lambda: _seq(SAGEConv(WIDTH, 4, flow="target_to_source")), "flow='target_to_source'"),
    (
        "rnn",
        lambda: Stack(_forward_a, rnn=torch.nn.LSTM(4, 4, 2, dropout=0.5), **_two()),
        "inner dropout cannot be keyed",
    ),
    ("sparse", lambda: Stack(_forward_a, table=torch.nn.Embedding(4, 4, sparse=True), **_two()), "sparse gradients"),
    ("twice", lambda: Stack(lambda self, x, e: self.a(self.a(x, e), e), **_two()), "a: expected one call per forward"),
    (
        "residual",
        lambda: Stack(lambda self, x, e: x + self.a(x, e), **_two()),
        r"to run on a mini-batch.*x\[:h.size\(0\)\] \+ h",
    ),
    (
        "slice",
        lambda: Stack(lambda self, x, e: self.a(x[1:], e), **_two()),
        "the input of a: expected rows of one frontier",
    ),
    (
        "skip",
        lambda: Stack(lambda self, x, e: self.b(self.a(x, e)[:3], e), **_two()),
        "the input of b: expected rows of one",
    ),
    (
        "output",
        lambda: Stack(lambda self, x, e: self.a(x, e)[:2], **_two()),
        "the model's output: expected rows of one",
    ),
    (
        "input norm",
        lambda: Stack(lambda self, x, e: self.a(self.n(x), e), n=torch.nn.BatchNorm1d(WIDTH).double(), **_two()),
        "batch norm: expected rows that one rank holds",
    ),
    (
        "pooled",
        lambda: Stack(lambda self, x, e: (h := self.a(x, e)) - h.mean(0), **_two()),
        "expected every target's output to depend on its neighbourhood only",
    ),
    (
        "own layer",
        lambda: Stack(lambda self, x, e: self.b(self.a(x, e), e), a=DegreeSquare(), b=DegreeSquare()),
        "outputs that change with the other targets",
    ),
    (
        "random",
        lambda: Stack(lambda self, x, e: self.a(x + torch.rand_like(x), e), **_two()),
        "rand_like in the model: expected no randomness",
    ),
    (
        "noise",
        lambda: Stack(lambda self, x, e: self.a(x, e) * torch.empty(1).uniform_(), **_two()),
        "uniform_ in the model: expected no randomness",
    ),
    (
        "alpha",
        lambda: Stack(lambda self, x, e: F.alpha_dropout(self.a(x, e), 0.5, True), **_two()),
        "alpha_dropout in the model",
    ),
    ("rrelu", lambda: Stack(lambda self, x, e: F.rrelu(self.a(x, e), training=True), **_two()), "rrelu in the model"),
    (
        "odd dropout",
        lambda: Stack(lambda self, x, e: self.a(x, e) * F.dropout(torch.ones(3), 0.5).sum(), **_two()),
        "dropout: expected rows of one frontier",
    ),
    (
        "edges",
        lambda: Stack(lambda self, x, e: self.a(x, e.flip(0)), **_two()),
        "batch.edge_index.flip: expected no tensor operation",
    ),
    ("no layers", lambda: torch.nn.Linear(WIDTH, 2), "the model: expected to run on a mini-batch of blocks"),
    (
        "unused",
        lambda: Stack(lambda self, x, e: self.lin(x), lin=torch.nn.Linear(WIDTH, 2).double(), **_two()),
        "message-passing layers that are called with it",
    ),
    (
        "attributes",
        lambda: Stack(lambda self, x, e: self.g(x, e, torch.ones(3)), g=pyg.GraphConv(WIDTH, 2).double()),
        "g: expected a call with rows and batch.edge_index .got 1 more tensors",
    ),
]


REFUSALS += [
    (
        "cumulated",
        lambda: Stack(lambda self, x, e: self.a(x, e).cumsum(0), **_two()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "numbered",
        lambda: Stack(lambda self, x, e: (h := self.a(x, e)) * torch.arange(h.size(0))[:, None], **_two()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "both ways",
        lambda: Stack(lambda self, x, e: self.b(self.two(x, e), e), two=BothWays(), **_two()),
        r"expected every target's output to depend on its neighbourhood only|to run on a mini-batch",
    ),
    (
        "closed gate",
        lambda: Stack(lambda self, x, e: self.gate(self.a(x, e)), gate=TrainedGate(), **_two()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "own norm",
        lambda: Stack(lambda self, x, e: self.norm(self.a(x, e)), norm=OwnNorm(), **_two()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "tuple",
        lambda: Stack(
            lambda self, x, e: (self.a(x, e), self.a.lin_l.weight.sum(), self.lin(x).mean()),
            lin=torch.nn.Linear(WIDTH, 2).double(),
            **_two(),
        ),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "sequence",
        lambda: Stack(lambda self, x, e: self.rnn(self.a(x, e))[0], rnn=torch.nn.GRU(WIDTH, 4).double(), **_two()),
        r"expected every target's output to depend on its neighbourhood only|to run on a mini-batch",
    ),
    (
        "attention",
        lambda: Stack(
            lambda self, x, e: self.mha(*[self.a(x, e).view(-1, 2, 3)] * 3)[0].flatten(1),
            **_two(),
            mha=torch.nn.MultiheadAttention(3, 1, dropout=0.5, batch_first=True).double(),
        ),
        r"draws from a generator in forward",
    ),
    (
        "functional norm",
        lambda: Stack(
            lambda self, x, e: torch.batch_norm(self.a(x, e), None, None, None, None, True, 0.1, 1e-5, False), **_two()
        ),
        r"batch_norm in the model: expected rows that are not mixed",
    ),
    (
        "wide norm",
        lambda: Stack(
            lambda self, x, e: self.n(self.a(x, e).view(-1, 2, 3)).flatten(1),
            n=torch.nn.BatchNorm1d(2).double(),
            **_two(),
        ),
        r"batch norm: expected rows of one dimension",
    ),
    ("feast", lambda: _seq(pyg.FeaStConv(WIDTH, 4).double()), "a rank may have no rows at all"),
    ("edge features", lambda: _seq(pyg.GINEConv(torch.nn.Linear(WIDTH, 4)).double()), "layers no edge features"),
]


def _forward_a(self: Any, x: Tensor, edge_index: Any) -> Tensor:
    return self.a(x, edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make, message", [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_what_cannot_be_exact_is_refused_when_wrapping(make: Callable[[], Module], message: str) -> None:
    model = make()
    with pytest.raises(InputError, match=f"(?s){message}"):
        parallelize(model, solo_mesh())
    hooks = [hook for m in model.modules() for hook in [*m._forward_pre_hooks.values(), *m._forward_hooks.values()]]
    assert not any(isinstance(hook, _Hook) for hook in hooks)  # left as it was


def test_an_input_of_unknown_width_is_asked_for() -> None:
    class Nothing(MessagePassing):  # type: ignore[misc]
        def forward(self, x: Any, edge_index: Any) -> Tensor:
            return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"a number of input features .*num_features="):
        parallelize(_seq(Nothing()), solo_mesh())
    batch = _batch(1)
    assert parallelize(_seq(Nothing()), solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index).shape == (20, WIDTH)


def test_batch_norm_needs_one_replica() -> None:
    mesh = solo_mesh()
    two = Mesh(mesh.device, mesh.shuffles, mesh.loading, mesh.gradients, mesh.world, 0, 2)
    with pytest.raises(InputError, match=r"batch norm: expected one replica .got 2"):
        parallelize(_sage(norm="batch_norm"), two)


def test_misuse_after_wrapping_is_named() -> None:
    model: Any = parallelize(_sage().double(), solo_mesh())
    shallow, deep = _batch(2), _batch(3)
    with pytest.raises(InputError, match=r"as many layers as sampled, 3 .got 2 in the loader's num_neighbors"):
        model(shallow.x, shallow.edge_index)
    with pytest.raises(InputError, match="a layer: expected a call from within the wrapped model's forward"):
        model.convs[0](deep.x, deep.edge_index)
    assert model(deep.x, deep.edge_index).shape == (20, CLASSES)  # and it still works
    with pytest.raises(RuntimeError):
        model(deep.x[:, :2], deep.edge_index)
    assert model(deep.x, deep.edge_index).shape == (20, CLASSES)


def test_checkpointed_layers_are_refused_rather_than_wrong() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        h = self.a(x, edge_index)
        return checkpoint(self.b, h, edge_index, use_reentrant=False)  # type: ignore[no-any-return]

    model = parallelize(Stack(forward, **_two()), solo_mesh())
    batch = _batch(2)
    with pytest.raises(InputError, match="activation checkpointing of layers is not supported"):
        model(batch.x, batch.edge_index).sum().backward()


def test_a_checkpointed_model_is_refused_rather_than_wrong() -> None:
    model = parallelize(_sage().double(), solo_mesh())
    batch = _batch(3)
    out: Any = checkpoint(lambda x: model(x, batch.edge_index), batch.x, use_reentrant=False)
    with pytest.raises(InputError, match="the model: expected a forward outside of backward"):
        out.sum().backward()


def test_hooks_on_messages_and_added_self_loops_are_kept() -> None:
    data, batch = _data(), _batch(2)
    watched: Any = Stack(lambda self, x, e: self.b(self.a(x, e), e), **_two())
    watched.a.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    looped = Stack(lambda self, x, e: self.b(self.a(x, e), e), a=pyg.SimpleConv("mean", "self_loop"), b=_two()["b"])
    for model in (watched, looped):
        want = model(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
        got = parallelize(model, solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index)
        assert torch.allclose(got, want, atol=1e-12)


class Named(Module):
    """Jumping knowledge by a named argument, behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _two()["a"], _two()["b"]
        self.norm, self.jk = torch.nn.BatchNorm1d(WIDTH).double(), pyg.JumpingKnowledge("cat")

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        h = self.norm(self.a(x, edge_index))
        return self.jk(xs=[h, self.b(h, edge_index)])  # type: ignore[no-any-return]


def test_frozen_batch_norm_and_named_jumping_knowledge() -> None:
    model: Any = parallelize(Named(), solo_mesh())
    batch = _batch(2)
    model.norm.eval()
    before = model.norm.running_mean.clone()
    assert model(batch.x, batch.edge_index).shape == (20, 2 * WIDTH)
    assert torch.equal(model.norm.running_mean, before)


def test_inference_mode_does_not_spoil_training() -> None:
    model, loader = parallelize(_sage(dropout=0.5).double(), solo_mesh()), _loader(3)
    with torch.inference_mode():
        batch = loader.make_batch(0, 0)
        model(batch.x, batch.edge_index)
    model(batch.x, batch.edge_index).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_layer_that_comes_late_is_refused() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        layer = self.b if getattr(self, "late", False) else self.a
        return layer(x, edge_index)  # type: ignore[no-any-return]

    model: Any = parallelize(Stack(forward, **_two()), solo_mesh())
    model.late = True
    batch = _batch(1)
    with pytest.raises(InputError, match="b: expected the same layers in every forward"):
        model(batch.x, batch.edge_index)


def test_a_forward_that_drops_now_and_then_is_refused() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        h = self.a(x, edge_index)
        return F.dropout(h, 0.5) if self.calls > 50 else h

    model = parallelize(Stack(forward, **_two()), solo_mesh())
    batch = _batch(1)
    model.calls = 99  # type: ignore[assignment]
    with pytest.raises(InputError, match="dropout: expected the same calls in every forward"):
        model(batch.x, batch.edge_index)


@pytest.mark.parametrize("make", [GraphSAGE, GIN, EdgeCNN])
def test_batches_without_targets_edges_or_inputs_pass(make: Any) -> None:
    data = Data(
        x=torch.ones(5, WIDTH), edge_index=torch.empty(2, 0, dtype=torch.int64), y=torch.zeros(5, dtype=torch.int64)
    )
    batch = NeighborLoader(data, [2, 2], torch.tensor([1]), 1, quiet=True).make_batch(0, 0)
    model = parallelize(make(WIDTH, 8, 2, CLASSES), solo_mesh())
    model(batch.x, batch.edge_index).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
