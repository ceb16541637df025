"""How a layer computes one block: an adapter per layer, chosen once, when the model is wrapped.

An adapter gets the rows of the block's sources and destinations, gives the layer its edges in the fastest form that is
exact for it, and returns the rows of the destinations.

| adapter          | layers                        | how                                                            |
|------------------|-------------------------------|----------------------------------------------------------------|
| run_attention    | GAT-, GATv2-, TransformerConv | fused kernels instead of the layer where they are exact        |
| run_linear       | SAGEConv, GraphConv           | host kernels instead of the layer where they are exact         |
| run_gin          | GINConv                       | host kernels for the sum, and for a network of Linear and ReLU |
| run_gcn          | GCNConv                       | normalised by the degrees of the whole graph; host kernels too |
| run_pair         | most                          | called with (rows of sources, rows of destinations)            |
| run_single_input | PNAConv, unknown ones         | called with one tensor of rows, output cut to the destinations |

The dry run finds out which of the last two an unknown layer needs (``nn.checks.dry_run``).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg

from gsplit.errors import InputError, explain
from gsplit.graph.blocks import Block
from gsplit.graph.types import EdgeType
from gsplit.kernels.csr import CsrEdges, csr_matrix
from gsplit.kernels.sums import EdgeSums
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.shuffle import RowExchange
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.attention import attention_edges, run_attention_layer, takes_fused_attention
from gsplit.nn.calls import LayerCall, is_plain_call, substitute
from gsplit.nn.fused_layers import (
    Activation,
    LayerRows,
    LinearForm,
    linear_form,
    linears_of,
    run_linear_form,
    run_linears,
    sums_as_gin,
    takes_host_kernels,
)
from gsplit.nn.layer_edges import GcnOptions, gcn_options, looped_edges, normalised_edges
from gsplit.nn.layers import adds_self_loops, has_own_methods, is_attention, is_single_input, takes_csr
from gsplit.nn.split_forward import SplitForward

__all__ = ["Adapter", "LayerInputs", "choose_adapter", "run_pair", "run_single_input"]


@dataclass(frozen=True)
class LayerInputs:
    """What a layer computes on.

    ``call``: the model's call of the layer, with handles in place of edges. ``h``: the rows of the local frontier.
    ``shuffle``: exchanges them for those of sources and destinations, ``mixed`` and ``dst``. ``exchange``: for layers
    that read the rows of other ranks where they lie; None if there are none. ``edge_attr``, ``edge_weight``: values of
    the block's edges, None where the call does not pass them. ``of``: the relation whose edges the layer gets, in a
    heterogeneous graph; None for all edges. ``dst_is_prefix``: ``dst`` are the first rows of ``mixed``.
    ``once(key, make)``: makes a value once per forward pass. ``around_stock(split)``: the context for calling a layer's
    own forward. ``attention_mask(layer, edges)``: the dropout mask of a fused attention layer. ``allows_fused``:
    whether fused kernels may compute the layer. ``activation``: the ReLU that the model calls on the layer's output, if
    the layer may apply it.
    """

    batch: Batch
    index: int
    call: LayerCall
    h: Tensor
    shuffle: Callable[[], tuple[Tensor, Tensor]]
    exchange: RowExchange | None
    edge_attr: Tensor | None
    edge_weight: Tensor | None
    once: Callable[[Any, Callable[[], Any]], Any]
    around_stock: Callable[[SplitForward], AbstractContextManager[None]]
    attention_mask: Callable[[Any, CsrEdges], Tensor | None]
    allows_fused: bool
    activation: Activation | None = None
    of: EdgeType | None = None
    dst_is_prefix: bool = True

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return self.shuffle()

    @property
    def mixed(self) -> Tensor:
        """The rows of the sources. A collective, when they are first read."""
        return self._rows[0]

    @property
    def dst(self) -> Tensor:
        """The rows of the destinations. A collective, when they are first read."""
        return self._rows[1]

    @property
    def block(self) -> Block:
        """The edges of the layer."""
        return self.batch.part(self.of).layers[self.index].block

    @property
    def kinds(self) -> Tensor | None:
        """The relation of every edge, if the edges are those of all relations."""
        return self.batch.kinds[self.index] if isinstance(self.batch, TypedBatch) and self.of is None else None


Adapter = Callable[[SplitForward, LayerInputs], Any]


def choose_adapter(split: SplitForward) -> Adapter:
    """The adapter of a layer; ``run_pair`` for unknown layers, which may turn out to need ``run_single_input``."""
    if is_attention(split.layer) and split.patched is None:
        return run_attention
    if isinstance(split.layer, pyg.GCNConv):
        return run_gcn
    if type(split.layer) in (pyg.SAGEConv, pyg.GraphConv) and split.patched is None:
        return run_linear
    if type(split.layer) is pyg.GINConv and split.patched is None:
        return run_gin
    return run_single_input if is_single_input(split.layer) else run_pair


def run_pair(split: SplitForward, inputs: LayerInputs) -> Any:
    """Call a layer with (rows of sources, rows of destinations)."""
    edges = _edges_for(split.layer, inputs, inputs.block, inputs.edge_weight, None)
    return _call_stock(split, inputs, (inputs.mixed, inputs.dst), edges)


def run_linear(split: SplitForward, inputs: LayerInputs) -> Any:
    """Compute a layer by host kernels, or call it."""
    form = _linear_form(split, inputs)
    if form is None:
        return run_pair(split, inputs)
    if form.reduction == "max":
        inputs = replace(inputs, exchange=None)  # backward reads the rows again
    rows = _layer_rows(inputs, _edge_sums(inputs, inputs.block, inputs.edge_weight, None))
    return run_linear_form(form, rows, inputs.activation)


def run_gin(split: SplitForward, inputs: LayerInputs) -> Any:
    """Sum the rows of a GINConv by host kernels and compute or call its network, or call the layer."""
    layer: Any = split.layer
    h = inputs.h
    dst = h if inputs.dst_is_prefix else inputs.dst
    fits = h.dim() == 2 and h.shape[1:] == dst.shape[1:]
    if not _allows_fused(split, inputs) or not sums_as_gin(layer) or not fits:
        return run_pair(split, inputs)
    if not takes_host_kernels(h, None, (dst, layer.eps)):
        return run_pair(split, inputs)
    rows = _layer_rows(inputs, _edge_sums(inputs, inputs.block, None, None))
    h = rows.aggregate(factor=1 + layer.eps)
    linears = linears_of(layer.nn, h)
    if linears is not None:
        return run_linears(linears, h, rows.pool, inputs.activation)
    with inputs.around_stock(split):
        return layer.nn(h)


def run_single_input(split: SplitForward, inputs: LayerInputs) -> Any:
    """Call a layer with one tensor of rows, and keep the destinations' outputs."""
    if inputs.of is not None and inputs.of[0] != inputs.of[2]:
        got = f"{type(split.layer).__name__}, which takes one tensor of rows"
        fix = "use a layer that takes a pair of tensors, such as SAGEConv((-1, -1), n), between different types"
        raise InputError(explain(f"{split.name} on {inputs.of}", "rows of sources and of destinations", got, fix))
    edges = _edges_for(split.layer, inputs, inputs.block, inputs.edge_weight, None)
    return _call_stock(split, inputs, inputs.mixed, edges)[: inputs.dst.size(0)]


def run_gcn(split: SplitForward, inputs: LayerInputs) -> Any:
    """Call a GCNConv with normalised edges. A collective if it normalises, in the first such layer on a block."""
    gcn = gcn_options(split.layer)
    if gcn is None:
        return run_single_input(split, inputs)
    if isinstance(inputs.batch, TypedBatch):
        fix = "use SAGEConv, GATConv, GraphConv or RGCNConv, or GCNConv(..., normalize=False)"
        got = "GCNConv, which normalises by the degrees of one relation; these are not counted"
        raise InputError(explain(split.name, "a layer that is exact on a heterogeneous graph", got, fix))
    key = ("gcn", inputs.index, gcn, inputs.edge_weight is not None, inputs.h.dtype)
    block, weights = inputs.once(key, lambda: _normalised(inputs, gcn))
    form = _linear_form(split, inputs)
    if form is not None and form.aggregates_first(block.num_src, block.num_dst, block.num_edges):
        rows = _layer_rows(inputs, _edge_sums(inputs, block, weights, gcn))
        return run_linear_form(form, rows, inputs.activation)
    edges = _edges_for(split.layer, inputs, block, weights, gcn)
    weights = edges.weights
    args, kwargs = substitute(inputs.call, inputs.mixed, edges.edges, weights, inputs.edge_attr)
    call = split.__signature__.bind(*args, **kwargs)
    if weights is not None and "edge_weight" not in call.signature.parameters:
        fix = "give forward an argument edge_weight=None and pass it on, or use GCNConv itself"
        raise InputError(explain(split.name, "a GCNConv whose forward takes edge_weight", call.signature, fix))
    call.arguments["edge_weight"] = weights  # also where the model passes none; None for a matrix, which holds them
    with inputs.around_stock(split), _temporarily(split.layer, "normalize", False), edges.summed_by(split.layer):
        return split.stock(*call.args, **call.kwargs)[: inputs.dst.size(0)]


def run_attention(split: SplitForward, inputs: LayerInputs) -> Any:
    """Compute an attention layer by fused kernels, or call it."""
    layer: Any = split.layer
    adds_loops = adds_self_loops(layer)
    if inputs.allows_fused and takes_fused_attention(split, inputs.call, inputs.mixed, inputs.edge_attr):
        edges = inputs.once(
            ("attention", inputs.index, adds_loops),
            lambda: attention_edges(inputs.block, add_self_loops=adds_loops),
        )
        keep = inputs.attention_mask(layer, edges)
        return run_attention_layer(layer, (inputs.mixed, inputs.dst), inputs.edge_attr, inputs.block, edges, keep)
    if inputs.mixed.device.type == "cpu" or not adds_loops:
        return run_pair(split, inputs)
    looped, edge_attr = looped_edges(inputs.block, inputs.edge_attr, layer)  # PyG's own way waits for the device
    inputs = replace(inputs, edge_attr=edge_attr)
    with _temporarily(layer, "add_self_loops", False):
        return _call_stock(split, inputs, (inputs.mixed, inputs.dst), _LayerEdges(looped))


@dataclass(frozen=True)
class _LayerEdges:
    """Edges as a layer takes them: ``edge_index`` and perhaps weights, or a CSR matrix, which holds the weights.

    ``sums``: what adds the rows along the edges instead of the layer, on a device.
    """

    edges: Any
    weights: Tensor | None = None
    sums: EdgeSums | None = None

    def summed_by(self, layer: Any) -> AbstractContextManager[None]:
        """Have a layer that is called with these edges add its rows by ``sums``."""
        sums = self.sums
        if sums is None:
            return nullcontext()

        def message_and_aggregate(edges: Any, x: Any, edge_weight: None = None) -> Tensor:
            return sums(x[0] if isinstance(x, tuple) else x, mean=layer.aggr == "mean")

        return _temporarily(layer, "message_and_aggregate", message_and_aggregate)


def _call_stock(split: SplitForward, inputs: LayerInputs, rows: Any, edges: _LayerEdges) -> Any:
    args, kwargs = substitute(inputs.call, rows, edges.edges, edges.weights, inputs.edge_attr, inputs.kinds)
    with inputs.around_stock(split), edges.summed_by(split.layer):
        return split.stock(*args, **kwargs)


@contextmanager
def _temporarily(layer: Module, option: str, value: Any) -> Iterator[None]:
    """Give an attribute of a layer another value while it runs: the adapter does that part."""
    before = {name: held for name, held in vars(layer).items() if name == option}
    setattr(layer, option, value)
    try:
        yield
    finally:
        delattr(layer, option)
        for name, held in before.items():
            setattr(layer, name, held)


def _normalised(inputs: LayerInputs, gcn: GcnOptions) -> tuple[Block, Tensor]:
    """GCN's edges and weights. A collective."""
    deg_inv_sqrt, loop_weight = inputs.batch.gcn_norm(
        inputs.index,
        add_self_loops=gcn.add_self_loops,
        fill_value=gcn.fill_value,
        weighted=inputs.edge_weight is not None,
        dtype=inputs.h.dtype,
    )
    return normalised_edges(
        inputs.block, deg_inv_sqrt, inputs.edge_weight, loop_weight, add_self_loops=gcn.add_self_loops
    )


def _edges_for(
    layer: Module, inputs: LayerInputs, block: Block, weights: Tensor | None, gcn: GcnOptions | None
) -> _LayerEdges:
    """A CSR matrix that holds the weights, or ``edge_index`` and the weights."""
    dtype = inputs.h.dtype
    device = block.indptr.device
    on_host = device.type == "cpu"
    sums_rows = not (has_own_methods(layer) or (weights is not None and weights.requires_grad))
    if not takes_csr(layer, dtype, device) or not (sums_rows or on_host):
        return _LayerEdges(inputs.once(("edge_index", inputs.index, inputs.of, gcn), block.edge_index), weights)

    def make_csr() -> _LayerEdges:
        indptr = block.indptr
        rows = block.src_rows
        if not sums_rows:
            values = torch.ones(block.num_edges, dtype=dtype, device=device) if weights is None else weights
            return _LayerEdges(csr_matrix(indptr, rows, values, num_columns=block.num_src))
        # the layer sees that its edges are a matrix, whose values are not read
        matrix = csr_matrix(indptr, rows, rows, num_columns=block.num_src)
        if not on_host and inputs.mixed.requires_grad and block is inputs.block:
            inputs.batch.context.transposed.add(inputs.index)
        return _LayerEdges(matrix, sums=_edge_sums(inputs, block, weights, gcn))

    key = ("csr", inputs.index, inputs.of, gcn, inputs.edge_weight is not None, dtype, sums_rows)
    made: _LayerEdges = inputs.once(key, make_csr)
    return made


def _edge_sums(inputs: LayerInputs, block: Block, weights: Tensor | None, gcn: GcnOptions | None) -> EdgeSums:
    """The sums over a block's edges, made once for all layers on it."""
    key = ("sums", inputs.index, inputs.of, gcn, inputs.edge_weight is not None, inputs.h.dtype)
    sums: EdgeSums = inputs.once(
        key, lambda: EdgeSums(block.indptr, block.src_rows, block.num_src, weights, block.by_source)
    )
    return sums


def _allows_fused(split: SplitForward, inputs: LayerInputs) -> bool:
    """Whether host kernels may compute a layer instead of its forward."""
    return inputs.allows_fused and split.patched is None and is_plain_call(split.__signature__, inputs.call)


def _linear_form(split: SplitForward, inputs: LayerInputs) -> LinearForm | None:
    """What host kernels compute instead of a layer; None where the layer itself is called."""
    form = linear_form(split.layer) if _allows_fused(split, inputs) else None
    if form is None:
        return None
    dst = inputs.h if inputs.dst_is_prefix else inputs.dst
    others = (dst, form.weight, form.root, form.bias)
    fits = form.fits(inputs.h, dst, inputs.edge_weight) and takes_host_kernels(inputs.h, inputs.edge_weight, others)
    return form if fits else None


def _layer_rows(inputs: LayerInputs, edges: EdgeSums) -> LayerRows:
    """The rows that host kernels read instead of a layer."""
    x = inputs.mixed if inputs.exchange is None else inputs.h
    dst = None if inputs.dst_is_prefix else inputs.dst
    return LayerRows(x, dst, edges, inputs.exchange, inputs.batch.context.pool)
