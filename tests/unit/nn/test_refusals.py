"""Models that cannot be exact on split mini-batches are refused when they are wrapped, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, OwnSingleInput, Stack, make_batch, sage, single, two_layers
from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg
from torch_geometric.nn import GraphSAGE, MessagePassing, SAGEConv

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.nn.wrappers_and_hooks import OwnHook


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


class CountedCalls(Module):
    """Depends on the number of calls, which it keeps as an attribute."""

    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class KeptMaximum(Module):
    """Divides by the largest value so far."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, h: Tensor) -> Tensor:
        if h.numel():
            self.largest = torch.maximum(self.largest.to(h), h.detach().abs().max())
        return h / self.largest


class EdgeNetwork(Module):
    """Takes edge features, whose number no layer declares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = pyg.NNConv(WIDTH, 2, torch.nn.Linear(3, 2 * WIDTH))

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Any) -> Tensor:
        out: Tensor = self.layer(x, edge_index, edge_attr)
        return out


class DegreeSingleInput(OwnSingleInput):
    """Looks at the other destinations of the block."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), edge_index)


REFUSALS: list[tuple[str, Callable[[], Module], str]] = [
    ("sg", lambda: single(pyg.SGConv(WIDTH, 4, K=2)), r"layer \(SGConv\): .*further than one hop.*one-hop layers"),
    ("tag", lambda: single(pyg.TAGConv(WIDTH, 4)), r"layer \(TAGConv\): .*further than one hop"),
    ("cheb", lambda: single(pyg.ChebConv(WIDTH, 4, K=3)), r"layer \(ChebConv\): .*further than one hop"),
    ("arma", lambda: single(pyg.ARMAConv(WIDTH, 4)), r"layer \(ARMAConv\): .*further than one hop"),
    ("appnp", lambda: single(pyg.APPNP(4, 0.1)), r"layer \(APPNP\): .*further than one hop"),
    (
        "gps",
        lambda: single(pyg.GPSConv(WIDTH, SAGEConv(WIDTH, WIDTH), heads=2)),
        r"layer \(GPSConv\): .*mixes all vertices",
    ),
    (
        "lstm",
        lambda: sage(aggr="lstm"),
        r"convs.0 \(SAGEConv\): .*LSTMAggregation, which fails on vertices without edges",
    ),
    ("median", lambda: sage(aggr="median"), r"convs.0 \(SAGEConv\): .*MedianAggregation"),
    (
        "layer norm",
        lambda: sage(norm="layer_norm"),
        r"norms.0 \(LayerNorm\): .*mode='graph'.*LayerNorm\(mode='node'\)",
    ),
    ("graph norm", lambda: sage(norm="graph_norm"), r"norms.0 \(GraphNorm\): .*mixes all vertices"),
    ("pair norm", lambda: sage(norm="pair_norm"), r"norms.0 \(PairNorm\): .*mixes all vertices"),
    ("instance norm", lambda: sage(norm="instance_norm"), r"norms.0 \(InstanceNorm\): .*mixes all vertices"),
    ("size norm", lambda: sage(norm=pyg.GraphSizeNorm()), r"norms.0 \(GraphSizeNorm\): .*mixes all vertices"),
    ("single", lambda: sage(norm="batch_norm", norm_kwargs={"allow_single_element": True}), "allow_single_element"),
    (
        "no statistics",
        lambda: sage(norm=torch.nn.BatchNorm1d(8, track_running_stats=False)),
        "keeps no running statistics",
    ),
    ("sync", lambda: sage(norm=torch.nn.SyncBatchNorm(8)), "process group of its own.*BatchNorm1d"),
    ("lazy", lambda: GraphSAGE(-1, 8, 3, CLASSES), "its size is not known yet.*instead of -1"),
    ("flow", lambda: single(SAGEConv(WIDTH, 4, flow="target_to_source")), "flow='target_to_source'"),
    (
        "rnn",
        lambda: Stack(_forward_a, rnn=torch.nn.LSTM(4, 4, 2, dropout=0.5), **two_layers()),
        "inner dropout cannot be keyed",
    ),
    (
        "sparse",
        lambda: Stack(_forward_a, table=torch.nn.Embedding(4, 4, sparse=True), **two_layers()),
        "sparse gradients",
    ),
    (
        "twice",
        lambda: Stack(lambda self, x, e: self.a(self.a(x, e), e), **two_layers()),
        "a: expected one call per forward",
    ),
    (
        "residual",
        lambda: Stack(lambda self, x, e: x + self.a(x, e), **two_layers()),
        r"to run on a mini-batch.*x\[:h.size\(0\)\] \+ h",
    ),
    (
        "slice",
        lambda: Stack(lambda self, x, e: self.a(x[1:], e), **two_layers()),
        "the input of a: expected rows of one frontier",
    ),
    (
        "skip",
        lambda: Stack(lambda self, x, e: self.b(self.a(x, e)[:3], e), **two_layers()),
        "the input of b: expected rows of one",
    ),
    (
        "output",
        lambda: Stack(lambda self, x, e: self.a(x, e)[:2], **two_layers()),
        "the model's output: expected rows of one",
    ),
    (
        "input norm",
        lambda: Stack(lambda self, x, e: self.a(self.n(x), e), n=torch.nn.BatchNorm1d(WIDTH).double(), **two_layers()),
        "batch norm: expected rows that one rank holds",
    ),
    (
        "pooled",
        lambda: Stack(lambda self, x, e: (h := self.a(x, e)) - h.mean(0), **two_layers()),
        "expected every target's output to depend on its neighbourhood only",
    ),
    (
        "own layer",
        lambda: Stack(lambda self, x, e: self.b(self.a(x, e), e), a=DegreeSingleInput(), b=DegreeSingleInput()),
        "outputs that change with the other targets",
    ),
    (
        "random",
        lambda: Stack(lambda self, x, e: self.a(x + torch.rand_like(x), e), **two_layers()),
        "rand_like in the model: expected no randomness",
    ),
    (
        "noise",
        lambda: Stack(lambda self, x, e: self.a(x, e) * torch.empty(1).uniform_(), **two_layers()),
        "uniform_ in the model: expected no randomness",
    ),
    (
        "alpha",
        lambda: Stack(lambda self, x, e: F.alpha_dropout(self.a(x, e), 0.5, True), **two_layers()),
        "alpha_dropout in the model",
    ),
    (
        "rrelu",
        lambda: Stack(lambda self, x, e: F.rrelu(self.a(x, e), training=True), **two_layers()),
        "rrelu in the model",
    ),
    (
        "odd dropout",
        lambda: Stack(lambda self, x, e: self.a(x, e) * F.dropout(torch.ones(3), 0.5).sum(), **two_layers()),
        "dropout: expected rows of one frontier",
    ),
    (
        "edges",
        lambda: Stack(lambda self, x, e: self.a(x, e.flip(0)), **two_layers()),
        r"batch.edge_index: expected no tensor operation .got .flip",
    ),
    (
        "unused",
        lambda: Stack(lambda self, x, e: self.lin(x), lin=torch.nn.Linear(WIDTH, 2).double(), **two_layers()),
        "message-passing layers called with edge_index",
    ),
    (
        "attributes",
        lambda: Stack(lambda self, x, e: self.g(x, e, torch.ones(3)), g=pyg.GraphConv(WIDTH, 2).double()),
        "g: expected a call with rows and what the batch has of edges .got 1 more tensors",
    ),
]


REFUSALS += [
    (
        "cumulated",
        lambda: Stack(lambda self, x, e: self.a(x, e).cumsum(0), **two_layers()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "numbered",
        lambda: Stack(lambda self, x, e: (h := self.a(x, e)) * torch.arange(h.size(0))[:, None], **two_layers()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "both ways",
        lambda: Stack(lambda self, x, e: self.b(self.two(x, e), e), two=BothWays(), **two_layers()),
        r"expected every target's output to depend on its neighbourhood only|to run on a mini-batch",
    ),
    (
        "closed gate",
        lambda: Stack(lambda self, x, e: self.gate(self.a(x, e)), gate=TrainedGate(), **two_layers()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "own norm",
        lambda: Stack(lambda self, x, e: self.norm(self.a(x, e)), norm=OwnNorm(), **two_layers()),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "tuple",
        lambda: Stack(
            lambda self, x, e: (self.a(x, e), self.a.lin_l.weight.sum(), self.lin(x).mean()),
            lin=torch.nn.Linear(WIDTH, 2).double(),
            **two_layers(),
        ),
        r"expected every target's output to depend on its neighbourhood only",
    ),
    (
        "sequence",
        lambda: Stack(
            lambda self, x, e: self.rnn(self.a(x, e))[0], rnn=torch.nn.GRU(WIDTH, 4).double(), **two_layers()
        ),
        r"expected every target's output to depend on its neighbourhood only|to run on a mini-batch",
    ),
    (
        "attention",
        lambda: Stack(
            lambda self, x, e: self.mha(*[self.a(x, e).view(-1, 2, 3)] * 3)[0].flatten(1),
            **two_layers(),
            mha=torch.nn.MultiheadAttention(3, 1, dropout=0.5, batch_first=True).double(),
        ),
        r"draws from a generator in forward",
    ),
    (
        "functional norm",
        lambda: Stack(
            lambda self, x, e: torch.batch_norm(self.a(x, e), None, None, None, None, True, 0.1, 1e-5, False),
            **two_layers(),
        ),
        r"batch_norm in the model: expected rows that are not mixed",
    ),
    (
        "wide norm",
        lambda: Stack(
            lambda self, x, e: self.n(self.a(x, e).view(-1, 2, 3)).flatten(1),
            n=torch.nn.BatchNorm1d(2).double(),
            **two_layers(),
        ),
        r"batch norm: expected a tensor \[rows, features\]",
    ),
    (
        "max_norm",
        lambda: Stack(
            lambda self, x, e: self.a(x, e) + self.m(torch.arange(3)).sum(),
            **two_layers(),
            m=torch.nn.Embedding(3, 1, max_norm=0.5),
        ),
        "max_norm, by which a rank changes only the rows that it reads",
    ),
    ("feast", lambda: single(pyg.FeaStConv(WIDTH, 4).double()), "a rank may have no rows at all"),
    (
        "edge features",
        lambda: single(pyg.GINEConv(torch.nn.Linear(WIDTH, 4)).double()),
        "edge_weight and edge_attr under these names",
    ),
    (
        "width of edges",
        EdgeNetwork,
        r"edge features of a known width .*num_edge_features=",
    ),
    (
        "width of rows",
        lambda: single(pyg.EdgeConv(torch.nn.Linear(2 * WIDTH, 2))),
        "Fix: widths that could not be found are given as num_features= and num_edge_features=.$",
    ),
    (
        "residual",
        lambda: Stack(lambda self, x, e: self.a(x, e) + x, **two_layers()),
        "Fix: a residual is x.:h.size.0.. . h, because a layer keeps its destinations only.$",
    ),
    (
        "counted calls",
        lambda: Stack(lambda self, x, e: self.n(self.a(x, e)), n=CountedCalls(), **two_layers()),
        "the same outputs for the same mini-batch .*count calls in a buffer",
    ),
    (
        "kept maximum",
        lambda: Stack(lambda self, x, e: self.m(self.a(x, e)), m=KeptMaximum(), **two_layers()),
        "buffers that do not depend on a mini-batch's rows .got m.largest,",
    ),
]


def _forward_a(self: Any, x: Tensor, edge_index: Any) -> Tensor:
    return self.a(x, edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make, message", [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_what_cannot_be_exact_is_refused_when_wrapping(make: Callable[[], Module], message: str) -> None:
    model = make()
    with pytest.raises(InputError, match=f"(?s){message}"):
        parallelize(model, solo_mesh())
    hooks = [hook for m in model.modules() for hook in [*m._forward_pre_hooks.values(), *m._forward_hooks.values()]]
    assert not any(isinstance(hook, OwnHook) for hook in hooks)  # left as it was
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_input_of_unknown_width_is_asked_for() -> None:
    class Nothing(MessagePassing):  # type: ignore[misc]
        def forward(self, x: Any, edge_index: Any) -> Tensor:
            return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"a number of input features .*num_features="):
        parallelize(single(Nothing()), solo_mesh())
    batch = make_batch(1)
    assert parallelize(single(Nothing()), solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index).shape == (
        20,
        WIDTH,
    )


def test_batch_norm_needs_one_replica() -> None:
    mesh = solo_mesh()
    two = Mesh(mesh.device, mesh.shuffles, mesh.loading, mesh.inputs, mesh.gradients, mesh.world, mesh.control, 0, 2)
    with pytest.raises(InputError, match=r"batch norm: expected one replica .got 2"):
        parallelize(sage(norm="batch_norm"), two)
