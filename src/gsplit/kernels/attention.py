"""Attention over the edges of a block, softmax and aggregation in one: what GATConv and GATv2Conv compute.

S sources, D destinations (the first rows of the sources), E edges grouped by destination (``kernels.csr``), H heads of
width C. For edge e from source s to destination i, and head h:

    GAT     raw[e, h]   = score_src[s, h] + score_dst[i, h] + score_edge[e, h]
            score[e, h] = leaky_relu(raw[e, h])
    GATv2   z[e, h, c]  = x_src[s, h, c] + x_dst[i, h, c] + x_edge[e, h, c]
            score[e, h] = sum over c of att[h, c] * leaky_relu(z[e, h, c])

    both    top[i, h]    = max over the edges e of i of score[e, h]
            alpha[e, h]  = exp(score[e, h] - top[i, h]) / (1e-16 + sum over e of i of exp(score[e, h] - top[i, h]))
            weight[e, h] = alpha[e, h] * keep[e, h] / (1 - p)      alpha itself without dropout, 0 for p = 1
            out[i, h, :] = sum over e of i of weight[e, h] * values[s, h, :]      0 for a destination without edges

values are [S, H, C], or [S, 1, C], one row for all heads (for GATv2 they are x_src). leaky_relu(r) is r for r > 0, else
negative_slope * r; its derivative at 0 is negative_slope. This is PyG's formula; sums run over a destination's edges in
their order, exponentials are added in float64.

Backward, from g [D, H, C], the gradient of out, with the maximum held constant as in PyG:

            delta[i, h]     = <g[i, h, :], out[i, h, :]>           = sum over e of alpha * its gradient
            g_score[e, h]   = weight[e, h] * <g[i, h, :], values[s, h, :]> - alpha[e, h] * delta[i, h]
            g_values[s, h]  = sum over the edges e of s of weight[e, h] * g[i, h, :]     over h too for [S, 1, C]
    GAT     g_raw[e, h]     = g_score[e, h] * leaky_relu'(raw[e, h])
            g_score_edge = g_raw;  g_score_src, g_score_dst: its sums over the edges of a source, of a destination
    GATv2   g_z[e, h, c]    = g_score[e, h] * att[h, c] * leaky_relu'(z[e, h, c])
            g_x_edge = g_z;  g_x_src = g_values + its sums over the edges of a source;  g_x_dst: of a destination
            g_att[h, c]     = sum over all edges of g_score[e, h] * leaky_relu(z[e, h, c])

Kept for backward: the inputs, out, and what the kernels ask for: numba's alpha [E, H], Triton's two numbers for each
destination and head. raw and z are made again. Nothing else has a row per edge, but g_score_edge and g_x_edge where
somebody wants them.

The numba kernels run on one thread and pass over the destinations once in each direction: adding to a source's row is
then neither a race nor a question of order, and no transposed matrix is needed. Triton's sum in other orders, and agree
to rounding. ``kernels.dispatch`` says which are used.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.kernels import gat_numba, gatv2_numba
from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.dispatch import kernel_for

__all__ = ["AttentionKernels", "attend", "gat_attention", "gatv2_attention"]


class AttentionKernels(Protocol):
    """A module that computes one of the two; inputs are in the order of ``gat_attention`` or ``gatv2_attention``."""

    def forward(self, edges: CsrEdges, inputs: Any, options: AttentionOptions) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``out``, and what ``backward`` wants of it."""

    def backward(
        self,
        edges: CsrEdges,
        inputs: Any,
        out: Tensor,
        kept: Any,
        g: Tensor,
        options: AttentionOptions,
        wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs; those that nobody wants may be None."""


class _Attention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, kernels: AttentionKernels, edges: CsrEdges, options: AttentionOptions, *inputs: Tensor | None
    ) -> Tensor:
        out, kept = kernels.forward(edges, inputs, options)
        ctx.kernels, ctx.edges, ctx.options, ctx.num_inputs = kernels, edges, options, len(inputs)
        ctx.save_for_backward(*inputs, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, count, wants = ctx.saved_tensors, ctx.num_inputs, ctx.needs_input_grad[3:]
        inputs, out, kept = saved[:count], saved[count], saved[count + 1 :]
        return None, None, None, *ctx.kernels.backward(ctx.edges, inputs, out, kept, g, ctx.options, wants)


def attend(kernels: AttentionKernels, edges: CsrEdges, options: AttentionOptions, *inputs: Tensor | None) -> Tensor:
    """Attention by some kernels, differentiable in the inputs; out [D, H, C]."""
    out: Tensor = _Attention.apply(kernels, edges, options, *inputs)  # type: ignore[no-untyped-call]
    return out


def gat_attention(
    edges: CsrEdges,
    values: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    score_edge: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """GAT's attention: values [S, H or 1, C], scores [S, H], [D, H] and [E, H] or None; out [D, H, C]."""
    kernels: AttentionKernels = gat_numba
    if kernel_for("attention", values.device, values.dtype) == "triton":
        from gsplit.kernels.triton import gat as kernels
    return attend(kernels, edges, options, values, score_src, score_dst, score_edge)


def gatv2_attention(
    edges: CsrEdges, x_src: Tensor, x_dst: Tensor, x_edge: Tensor | None, att: Tensor, options: AttentionOptions
) -> Tensor:
    """GATv2's attention: x_src [S, H, C], x_dst [D, H, C], x_edge [E, H, C] or None, att [H, C]; out [D, H, C]."""
    kernels: AttentionKernels = gatv2_numba
    if kernel_for("attention", x_src.device, x_src.dtype) == "triton":
        from gsplit.kernels.triton import gatv2 as kernels
    return attend(kernels, edges, options, x_src, x_dst, x_edge, att)
