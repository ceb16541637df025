"""GATConv, GATv2Conv and TransformerConv by fused kernels (``kernels.attention``), where that is exact.

PyG makes several tensors with a row per edge and all channels; the kernels make none. The formula, the parameters, the
self-loops and the masks of attention dropout are the same; sums run in another order, so results are equal to rounding.
``takes_fused_attention`` decides where the kernels are used. Everywhere else PyG's layer runs: subclasses, user hooks
on the layer or inside it, explanations, returned attention weights, other aggregations than the sum, autocast,
TransformerConv with edge features, and types and devices for which ``kernels.dispatch`` has no kernel.

GAT's scores are linear in the rows, x @ (W a), and so are the values it sums. It can therefore aggregate the rows
themselves and project the D sums, instead of projecting all S rows and aggregating those; ``aggregates_first`` picks
the cheaper.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch_geometric import nn as pyg

from gsplit.graph.blocks import Block
from gsplit.kernels.attention import dot_product_attention, gat_attention, gatv2_attention
from gsplit.kernels.attention_types import AttentionOptions, aggregates_first
from gsplit.kernels.csr import LOOP, CsrEdges, destination_rows, make_csr_edges
from gsplit.kernels.dispatch import Operation, kernel_for
from gsplit.nn.calls import LayerCall, is_plain_call
from gsplit.nn.layer_edges import loop_once, looped_edges
from gsplit.nn.layers import is_attention
from gsplit.nn.split_forward import SplitForward
from gsplit.nn.wrappers_and_hooks import has_user_hooks, runs_pyg_code

__all__ = ["attention_edges", "run_attention_layer", "takes_fused_attention"]


def _is_plain(layer: Any) -> bool:
    """Whether a layer computes what PyG's class does, without user hooks on it or inside it."""
    if not is_attention(layer) or has_user_hooks(layer) or not runs_pyg_code(layer):
        return False
    if type(layer) is pyg.GATConv:
        biases = [getattr(part, "bias", None) for part in layer.children() if part is not layer.res]
        if any(bias is not None for bias in biases):  # scores are made of weights alone
            return False
    usual = layer.aggr in ("add", "sum") and layer.flow == "source_to_target" and layer.decomposed_layers == 1
    return usual and layer.node_dim == 0


def takes_fused_attention(split: SplitForward, call: LayerCall, rows: Tensor, edge_attr: Tensor | None) -> bool:
    """Whether fused kernels compute a layer that is called like this on these rows and edge features."""
    layer: Any = split.layer
    is_transformer = type(layer) is pyg.TransformerConv
    operation: Operation = "dot-product attention" if is_transformer else "attention"
    if not is_attention(layer) or kernel_for(operation, rows.device, rows.dtype) == "torch":
        return False
    if is_transformer and not (edge_attr is None and layer.lin_edge is None):
        return False
    if rows.dim() != 2 or torch.is_autocast_enabled(rows.device.type):
        return False
    if edge_attr is not None and (layer.lin_edge is None or edge_attr.dtype != rows.dtype or edge_attr.dim() > 2):
        return False
    if not _is_plain(layer) or not is_plain_call(split.__signature__, call):
        return False
    held = [p for part in (layer, *layer.children()) for p in part._parameters.values() if p is not None]
    return {(p.dtype, p.device) for p in held} == {(rows.dtype, rows.device)}


def attention_edges(block: Block, *, add_self_loops: bool) -> CsrEdges:
    """The edges that the kernels take, with PyG's self-loops if the layer adds some. Does not wait for a device."""
    device = block.indptr.device
    if device.type == "cpu":
        return make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=add_self_loops)
    places = torch.arange(block.num_edges, device=device) - block.indptr[block.dst_rows()]
    if not add_self_loops:
        return CsrEdges(block.indptr, block.src_rows, places, block.num_src)
    looped = loop_once(block)
    loops = torch.full((block.num_dst,), LOOP, device=device)
    return CsrEdges(looped.block.indptr, looped.block.src_rows, looped.merge(places, loops), block.num_src)


def _per_head(weight: Tensor, att: Tensor) -> Tensor:
    """att . W of every head: [H * C, K] and [1, H, C] give [H, K]."""
    return torch.einsum("hck,hc->hk", weight.view(att.size(1), att.size(2), -1), att[0])


class _Scores(torch.autograd.Function):
    """GAT's scores of sources and destinations, which are the first sources; one gradient of the rows for both.

    forward:  score_src = x @ v_src^T [S, H];  score_dst = x[:D] @ v_dst^T [D, H]          x [S, K], v_* [H, K]
    backward: g_x = g_src @ v_src, and g_x[:D] += g_dst @ v_dst;  g_v_src = g_src^T @ x;  g_v_dst = g_dst^T @ x[:D]

    Saved: the inputs. From two products autograd would make two gradients as large as x, and a third of zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, v_src: Tensor, v_dst: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, v_src, v_dst)
        return x @ v_src.t(), x[:num_dst] @ v_dst.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_src: Tensor, g_dst: Tensor) -> tuple[Tensor | None, ...]:
        x, v_src, v_dst = ctx.saved_tensors
        num_dst, g_x = g_dst.size(0), None
        if ctx.needs_input_grad[0]:
            g_x = g_src @ v_src
            g_x[:num_dst].addmm_(g_dst, v_dst)
        return g_x, g_src.t() @ x, g_dst.t() @ x[:num_dst], None


class _Project(torch.autograd.Function):
    """Every head's sums through its own matrix, without a copy in another order.

    forward:  out[:, h] = z[:, h] @ w[h]^T                                       z [D, H, K], w [H, C, K], out [D, H, C]
    backward: g_z[:, h] = g[:, h] @ w[h];  g_w[h] = g[:, h]^T @ z[:, h]          saved: the inputs
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(z, w)
        out = z.new_empty(z.size(0), w.size(0), w.size(1))
        for h in range(w.size(0)):
            torch.mm(z[:, h], w[h].t(), out=out[:, h])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        z, w = ctx.saved_tensors
        g_z, g_w = torch.empty_like(z), torch.empty_like(w)
        for h in range(w.size(0)):
            torch.mm(g[:, h], w[h], out=g_z[:, h])
            torch.mm(g[:, h].t(), z[:, h], out=g_w[h])
        return g_z, g_w


def _run_gat(
    layer: Any, mixed: Tensor, dst: Tensor, edge_attr: Tensor | None, edges: CsrEdges, options: AttentionOptions
) -> Tensor:
    heads = layer.heads
    width = layer.out_channels
    lin_src = layer.lin_src if layer.lin is None else layer.lin
    lin_dst = layer.lin_dst if layer.lin is None else layer.lin
    v_src = _per_head(lin_src.weight, layer.att_src)
    v_dst = _per_head(lin_dst.weight, layer.att_dst)
    score_src, score_dst = _Scores.apply(mixed, v_src, v_dst, dst.size(0))  # type: ignore[no-untyped-call]
    score_edge = None if edge_attr is None else edge_attr @ _per_head(layer.lin_edge.weight, layer.att_edge).t()
    if not aggregates_first(mixed.size(0), dst.size(0), edges.num_edges, heads, mixed.size(1), width):
        values = lin_src(mixed).view(-1, heads, width)
        return gat_attention(edges, values, score_src, score_dst, score_edge, options)
    sums = gat_attention(edges, mixed.unsqueeze(1), score_src, score_dst, score_edge, options)
    out: Tensor = _Project.apply(sums, lin_src.weight.view(heads, width, -1))  # type: ignore[no-untyped-call]
    return out


def _run_gatv2(
    layer: Any, mixed: Tensor, dst: Tensor, edge_attr: Tensor | None, edges: CsrEdges, options: AttentionOptions
) -> Tensor:
    shape = (-1, layer.heads, layer.out_channels)
    x_src, x_dst = layer.lin_l(mixed).view(shape), layer.lin_r(dst).view(shape)
    x_edge = None if edge_attr is None else layer.lin_edge(edge_attr).view(shape)
    return gatv2_attention(edges, x_src, x_dst, x_edge, layer.att[0], options)


def _run_transformer(layer: Any, mixed: Tensor, dst: Tensor, edges: CsrEdges, options: AttentionOptions) -> Tensor:
    shape = (-1, layer.heads, layer.out_channels)
    queries = layer.lin_query(dst).view(shape)
    keys = layer.lin_key(mixed).view(shape)
    values = layer.lin_value(mixed).view(shape)
    out = dot_product_attention(edges, queries, keys, values, options)
    out = out.flatten(1) if layer.concat else out.mean(dim=1)
    if not layer.root_weight:
        return out.clone() if layer.concat else out  # the kernels read theirs again; a model may change this one
    root: Tensor = layer.lin_skip(dst)
    if layer.lin_beta is None:
        return out + root
    beta = layer.lin_beta(torch.cat([out, root, out - root], dim=1)).sigmoid()
    mixture: Tensor = beta * root + (1 - beta) * out
    return mixture


def _in_order(layer: Any, block: Block, edges: CsrEdges, edge_attr: Tensor) -> Tensor:
    """Edge features in the order of ``edges``, with PyG's own for self-loops; [E, F]."""
    if layer.add_self_loops:
        _, looped = looped_edges(block, edge_attr, layer)  # those of the edges, then those of the self-loops
        assert looped is not None
        num_others, device = looped.size(0) - block.num_dst, looped.device
        dst_rows = destination_rows(edges.indptr, edges.num_edges)
        places = torch.arange(edges.num_edges, device=device) - dst_rows  # one self-loop per earlier destination
        edge_attr = looped[torch.where(edges.places == LOOP, num_others + dst_rows, places)]
    return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr


def run_attention_layer(
    layer: Module,
    rows: tuple[Tensor, Tensor],
    edge_attr: Tensor | None,
    block: Block,
    edges: CsrEdges,
    keep: Tensor | None,
) -> Tensor:
    """The output of a layer for a block.

    ``rows``: the sources, and the destinations, which are the first sources. ``edges``: the edges, with self-loops if
    the layer adds some. ``edge_attr``: features of the block's own edges. ``keep``: the mask of attention dropout.
    """
    conv: Any = layer
    if isinstance(conv, pyg.TransformerConv):
        return _run_transformer(conv, *rows, edges, AttentionOptions(keep=keep, p=conv.dropout))
    options = AttentionOptions(conv.negative_slope, keep, conv.dropout)
    attr = None if edge_attr is None else _in_order(conv, block, edges, edge_attr)
    mixed, dst = rows
    run = _run_gat if isinstance(conv, pyg.GATConv) else _run_gatv2
    out = run(conv, mixed, dst, attr, edges, options)
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if conv.res is None and conv.bias is None:
        return out.clone() if conv.concat else out  # as for TransformerConv
    out = out if conv.res is None else out + conv.res(dst)
    return out if conv.bias is None else out + conv.bias
