"""How models are called with a batch: by the arguments that their forward has."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import Module
from torch_geometric.nn import GCNConv, SAGEConv

from gsplit.errors import InputError
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeWeightHandle
from gsplit.nn.calls import call_model


class Called(Module):
    """Returns what it was called with."""

    def __init__(self, forward: Callable[..., Any], conv: Module) -> None:
        super().__init__()
        self.conv = conv
        self.forward = forward


def _batch(weighted: bool) -> Batch:
    """All that a call needs of a batch; ``weighted``: it carries weights and features of edges."""
    fields = {"x": torch.ones(2, 3), "has_edge_weight": weighted, "has_edge_attr": weighted}
    batch = SimpleNamespace(**fields)
    batch.edge_weight, batch.edge_attr = EdgeWeightHandle(batch), EdgeAttrHandle(batch)
    return cast(Batch, batch)


ONE: list[Callable[..., Any]] = [
    lambda batch: batch,
    lambda data: data,
    lambda g: g,
    lambda g, /: g,
    lambda data, return_embedding=False: data,
    lambda data, *, layer=None: data,
    lambda data=None: data,
    lambda data, **options: data,
]


@pytest.mark.parametrize("forward", ONE)
def test_a_forward_of_one_argument_takes_the_batch(forward: Callable[..., Any]) -> None:
    batch = _batch(True)
    assert call_model(Called(forward, SAGEConv(3, 3)), batch) is batch


EDGES: list[Callable[..., Any]] = [
    lambda x, edge_index: (x, edge_index),
    lambda feats, edges: (feats, edges),
    lambda x, edge_index=None: (x, edge_index),
    lambda x, adj_t=None: (x, adj_t),
    lambda x, edge_index, batch=None: (x, edge_index),
    lambda *args: args,
    lambda x, *args: (x, *args),
    lambda *args, **kwargs: args,
]


@pytest.mark.parametrize("forward", EDGES)
def test_a_forward_of_more_takes_rows_and_edges(forward: Callable[..., Any]) -> None:
    batch = _batch(True)
    x, edges = call_model(Called(forward, GCNConv(3, 3, normalize=False)), batch)
    assert x is batch.x
    assert isinstance(edges, EdgeHandle) and edges.batch is batch


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_are_given_by_name_if_the_batch_has_them(weighted: bool) -> None:
    def forward(x: Any, edge_index: Any, edge_attr: Any = None, *, edge_weight: Any = None) -> Any:
        return edge_attr, edge_weight

    attr, weight = call_model(Called(forward, GCNConv(3, 3, normalize=False)), _batch(weighted))
    assert attr is None
    assert isinstance(weight, EdgeWeightHandle) == weighted


def _with_weight(x: Any, edge_index: Any, edge_weight: Any) -> Any:
    return edge_weight


def test_weights_that_a_forward_must_have_are_given_or_missed() -> None:
    model = Called(_with_weight, GCNConv(3, 3, normalize=False))
    assert isinstance(call_model(model, _batch(True)), EdgeWeightHandle)
    with pytest.raises(InputError, match=r"the model's forward: expected \(x, edge_index\), with edge_weight"):
        call_model(model, _batch(False))


OTHERS: list[tuple[Callable[..., Any], str]] = [
    (lambda x, edge_index, pos: x, r"\(x, edge_index, pos\)"),
    (lambda x, edge_index, *, pos: x, r"\(x, edge_index, \*, pos\)"),
    (lambda: None, r"\(\)"),
]


@pytest.mark.parametrize("forward, got", OTHERS, ids=["third", "named", "none"])
def test_other_forwards_are_refused_with_what_is_accepted(forward: Callable[..., Any], got: str) -> None:
    message = rf"expected \(x, edge_index\), .* or \(batch\) \(got {got}\).*give other arguments a default"
    with pytest.raises(InputError, match=message):
        call_model(Called(forward, SAGEConv(3, 3)), _batch(True))
