"""Attention over the edges of a block, softmax and aggregation in one: GATConv, GATv2Conv and TransformerConv.

S sources, D destinations (the first rows of the sources), E edges grouped by destination (``kernels.csr``), H heads of
width C. For edge e from source s to destination i, and head h:

    GAT     z[e, h]     = src_terms[s, h] + dst_terms[i, h] + edge_terms[e, h]
            score[e, h] = leaky_relu(z[e, h])
    GATv2   z[e, h, c]  = values[s, h, c] + dst_terms[i, h, c] + edge_terms[e, h, c]
            score[e, h] = sum over c of att[h, c] * leaky_relu(z[e, h, c])
    dot     score[e, h] = <queries[i, h, :], keys[s, h, :]> / sqrt(C)                       TransformerConv

    all     top[i, h]    = max over the edges e of i of score[e, h]
            alpha[e, h]  = exp(score[e, h] - top[i, h]) / (1e-16 + sum over e of i of exp(score[e, h] - top[i, h]))
            weight[e, h] = alpha[e, h] * keep[e, h] / (1 - p)      alpha itself without dropout, 0 for p = 1
            out[i, h, :] = sum over e of i of weight[e, h] * values[s, h, :]      0 for a destination without edges

values are [S, H, C], or for GAT also [S, 1, C], one row for all heads. leaky_relu(r) is r for r > 0, else
negative_slope * r; its derivative at 0 is negative_slope. Keys are src_terms [S, H, C], queries dst_terms [D, H, C].
These are PyG's formulas; sums run over a destination's edges in their order, exponentials are added in float64.

Backward, from g [D, H, C], the gradient of out, with the maximum held constant as in PyG:

            delta[i, h]     = <g[i, h, :], out[i, h, :]>           = sum over e of alpha * its gradient
            g_score[e, h]   = weight[e, h] * <g[i, h, :], values[s, h, :]> - alpha[e, h] * delta[i, h]
            g_values[s, h]  = sum over the edges e of s of weight[e, h] * g[i, h, :]     over h too for [S, 1, C]
    GAT     g_z[e, h]       = g_score[e, h] * leaky_relu'(z[e, h])
            g_src_terms: sums of g_z over the edges of a source
    GATv2   g_z[e, h, c]    = g_score[e, h] * att[h, c] * leaky_relu'(z[e, h, c])
            g_values also gets the sums of g_z over the edges of a source
            g_att[h, c]     = sum over all edges of g_score[e, h] * leaky_relu(z[e, h, c])
    dot     g_keys[s, h]    = sum over the edges e of s of g_score[e, h] * queries[i, h, :] / sqrt(C)
            g_queries[i, h] = sum over the edges e of i of g_score[e, h] * keys[s, h, :] / sqrt(C)
    others  g_dst_terms: sums of g_z over the edges of a destination;  g_edge_terms = g_z

Kept for backward: the inputs, out, and what the kernels need: alpha [E, H] for numba, two numbers per destination and
head for Triton. z is computed again. Nothing else has a row per edge, except g_edge_terms where it is wanted.

The numba kernels run on one thread and pass over the destinations once in each direction: adding to a source's row is
then neither a race nor dependent on an order, and no transposed matrix is needed. Triton's kernels sum in other orders
and agree to rounding; there are none for dot products. ``kernels.dispatch`` chooses between them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.kernels.attention_types import AttentionInputs, AttentionKernels, AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.dispatch import kernel_for

__all__ = ["attend", "dot_product_attention", "gat_attention", "gatv2_attention"]


class _Attention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, kernels: AttentionKernels, edges: CsrEdges, options: AttentionOptions, *inputs: Any
    ) -> Tensor:
        out, kept = kernels.forward(edges, AttentionInputs(*inputs), options)
        ctx.kernels = kernels
        ctx.edges = edges
        ctx.options = options
        ctx.save_for_backward(*inputs, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        count = len(AttentionInputs._fields)
        grads = ctx.kernels.backward(
            ctx.edges,
            inputs=AttentionInputs(*saved[:count]),
            out=saved[count],
            kept=saved[count + 1 :],
            g=g,
            options=ctx.options,
            wants=ctx.needs_input_grad[3:],
        )
        return None, None, None, *grads


def attend(kernels: AttentionKernels, edges: CsrEdges, options: AttentionOptions, inputs: AttentionInputs) -> Tensor:
    """Attention by some kernels, differentiable in the inputs; out [D, H, C]."""
    out: Tensor = _Attention.apply(kernels, edges, options, *inputs)  # type: ignore[no-untyped-call]
    return out


def _kernels_for(values: Tensor) -> AttentionKernels:
    if kernel_for("attention", values.device, values.dtype) == "triton":
        from gsplit.kernels.triton import attention as on_device

        return on_device
    from gsplit.kernels import attention_numba as on_host

    return on_host


def gat_attention(
    edges: CsrEdges,
    values: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    score_edge: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """GAT's attention: values [S, H or 1, C], scores [S, H], [D, H] and [E, H] or None; out [D, H, C]."""
    return attend(
        _kernels_for(values), edges, options, AttentionInputs(values, score_src, score_dst, score_edge, att=None)
    )


def gatv2_attention(
    edges: CsrEdges, x_src: Tensor, x_dst: Tensor, x_edge: Tensor | None, att: Tensor, options: AttentionOptions
) -> Tensor:
    """GATv2's attention: x_src [S, H, C], x_dst [D, H, C], x_edge [E, H, C] or None, att [H, C]; out [D, H, C]."""
    return attend(_kernels_for(x_src), edges, options, AttentionInputs(x_src, None, x_dst, x_edge, att))


def dot_product_attention(
    edges: CsrEdges, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """TransformerConv's attention, on the host: queries [D, H, C], keys and values [S, H, C]; out [D, H, C]."""
    from gsplit.kernels import attention_numba as on_host

    inputs = AttentionInputs(values, src_terms=keys, dst_terms=queries, edge_terms=None, att=None)
    return attend(on_host, edges, options, inputs)
